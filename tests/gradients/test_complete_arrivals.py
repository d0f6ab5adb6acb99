"""Gradients that arrive complete are not announced by hooks any more; what arrives otherwise later is still reduced."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from tests.device import device_type
from tests.ranks import RankPools
from vescale.gradients import GradientReducer

WHOLE, CUT = Replicate(), Shard(0)
# For each step the placements of the batches whose gradients add up; a Shard makes gradients Partial.
STEPS = [[WHOLE], [WHOLE], [WHOLE], [CUT], [WHOLE], [WHOLE, WHOLE], [WHOLE, CUT], [WHOLE], [CUT, CUT], [WHOLE]]


def steps() -> list[int]:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    many = distribute_module(copy.deepcopy(one), mesh)
    reducer = GradientReducer(many, mesh)
    num_muted = []
    for number, placements in enumerate(STEPS):
        one.zero_grad()
        many.zero_grad()
        last = len(placements) - 1
        for index, placement in enumerate(placements):
            x = torch.randn(4, 4, dtype=torch.float64)
            one(x).square().sum().backward()
            waits = reducer.no_sync() if number == 8 and index < last else contextlib.nullcontext()
            with waits:
                output: Any = many(distribute_tensor(x, mesh, [placement]))
                output.square().sum().backward()
        for expected, found in zip(one.parameters(), many.parameters()):
            assert found.grad.placements == (Replicate(),), (number, found.grad.placements)
            torch.testing.assert_close(found.grad.to_local(), expected.grad, rtol=1e-12, atol=1e-12)
        num_muted.append(sum(reduced.hooks._handle is None for reduced in reducer._parameters))
    return num_muted


def test_gradients_of_any_order(ranks: RankPools) -> None:
    for num_muted in ranks.run(steps, world_size=2):
        assert num_muted[2] == 4, num_muted  # or the test would show nothing
        assert num_muted[3] == num_muted[6] == num_muted[8] == 0, num_muted
