"""Ops on a mesh of 64 ranks, simulated as threads of this process."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.device import device_type
from tests.ops.layouts import assert_same, data
from tests.simulate import simulate
from vescale.ops import strict_placements
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor


def on_simulated_rank() -> None:
    mesh = init_device_mesh(device_type(), (8, 8))
    for placements in (
        [RaggedShard(), Shard(0)],
        [RaggedShard((0,), (0, 5, 3, 0, 0, 1, 20, 35)), Replicate()],
        [RaggedShard(), InterleavedShard(1, 2)],
    ):
        full, gradient = data(0, (64, 6)), data(1, (64, 6))
        ours = torch.nn.Parameter(distribute_tensor(full.clone(), mesh, placements, src_data_rank=None))
        theirs = torch.nn.Parameter(full.clone())
        ours.grad = distribute_tensor(gradient.clone(), mesh, placements, src_data_rank=None)
        theirs.grad = gradient
        with strict_placements():
            norm = torch.nn.utils.clip_grad_norm_([ours], 0.5, math.inf)
            torch.optim.AdamW([ours], foreach=True).step()
            position = ours.argmax()
        assert_same(norm, torch.nn.utils.clip_grad_norm_([theirs], 0.5, math.inf))
        torch.optim.AdamW([theirs], foreach=True).step()
        assert_same(ours.detach(), theirs.detach())
        assert_same(position, theirs.argmax())


def test_ops_on_64_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch asks of multi-threaded tests: fake tensor modes of different threads must not interleave.
    monkeypatch.setattr(ShardingPropagator, "_fake_mode_lock", threading.Lock())
    simulate(on_simulated_rank, 64)
