"""The real code on 64 ranks, simulated as threads of this process."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial

from tests.device import device_type
from tests.placements.on_ranks import Source, local, row_major_mesh
from tests.placements.specs import draw_placements, draw_units
from tests.placements.test_redistribute import move_and_compare
from tests.ranks import run_cases
from tests.simulate import SimulationError, simulate
from vescale.comm import record_comms
from vescale.placements import InterleavedShard, RaggedShard, distribute_tensor, has_custom, redistribute


def pairs(mesh_shape: tuple[int, ...], shape: tuple[int, ...], count: int) -> int:
    rng = random.Random(str((mesh_shape, shape)))
    ranks = row_major_mesh(mesh_shape).mesh.tolist()
    nested = nest(ranks)
    cases: list[tuple[Any, ...]] = []
    while len(cases) < count:
        op = ("sum",) if len(cases) % 2 else ()
        source = draw_placements(rng, shape, mesh_shape, partial_ops=op, ragged=0.8)
        target = draw_placements(rng, shape, mesh_shape, ragged=0.8)
        if has_custom((*source, *target)):
            cases.append((nested, shape, source, target, len(cases)))
    return run_cases(move_and_compare, cases)


def nest(ranks: Any) -> Any:
    return tuple(nest(row) for row in ranks) if isinstance(ranks, list) else ranks


@pytest.mark.parametrize(("mesh_shape", "count"), [((64,), 4), ((8, 8), 4), ((4, 4, 4), 4), ((2, 32), 3)], ids=str)
def test_random_pairs_on_64_ranks(mesh_shape: tuple[int, ...], count: int) -> None:
    assert simulate(pairs, 64, mesh_shape, (13, 7), count) == [count] * 64


def named_pairs() -> None:
    """FSDP over TP: rows reordered by the ragged cut come back in order; gradients reduce-scatter over dp only."""
    mesh = init_device_mesh(device_type(), (16, 4), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(64.0 * 6).reshape(64, 6)
    placed = distribute_tensor(whole, mesh, (RaggedShard(), Shard(0)))
    assert torch.equal(placed.full_tensor(), whole)
    with record_comms() as ledger:
        unsharded = placed.redistribute(placements=(Replicate(), Shard(0)))
    assert [(r.op, r.num_ranks) for r in ledger.records] == [("all_gather_v", 16)]
    assert unsharded.to_local().shape == (16, 6)
    gradient = Source(mesh, (64, 6), (Partial(), Shard(0)), torch.float32, seed=1)
    with record_comms() as ledger:
        reduced = redistribute(gradient.dtensor(), placements=placed.placements)
    gradient.check(local(reduced), placed.placements, "gradient")
    assert [(r.op, r.num_ranks) for r in ledger.records] == [("reduce_scatter_v", 16)]
    assert ledger.bytes() == (16 * 6 - local(reduced).numel()) * 4


def test_fsdp_over_tp() -> None:
    simulate(named_pairs, 64)


def skewed() -> None:
    """One rank of 64 owns nearly everything: no padded collective, no more bytes than elements."""
    mesh = row_major_mesh((64,))
    units = [1] * 64
    units[17] = 1000
    whole = torch.arange(float(sum(units))).reshape(-1, 1)
    placed = distribute_tensor(whole, mesh, (RaggedShard((0,), units),))
    with record_comms() as ledger:
        gathered = placed.redistribute(placements=(Replicate(),))
    assert torch.equal(local(gathered), whole) and ledger.records[0].padding_bytes == 0
    assert ledger.bytes() == (whole.numel() - local(placed).numel()) * 4
    balanced = placed.redistribute(placements=(RaggedShard(),))
    assert torch.equal(balanced.full_tensor(), whole)
    chunks = placed.redistribute(placements=(InterleavedShard(0, 3),), async_op=True)
    assert torch.equal(chunks.full_tensor(), whole)


def test_skewed_units() -> None:
    simulate(skewed, 64)


def test_gradients_on_64_ranks() -> None:
    def body() -> None:
        mesh = row_major_mesh((8, 8))
        shape = (24, 10)
        whole = torch.arange(float(math.prod(shape)), dtype=torch.float64).reshape(shape).requires_grad_()
        units = draw_units(random.Random(3), 24, 8)
        placed = distribute_tensor(whole, mesh, (Replicate(), RaggedShard((0,), units)))
        full = placed.full_tensor()
        (full**2).sum().backward()
        assert placed.grad is not None and placed.grad.placements == placed.placements
        assert torch.equal(placed.grad.full_tensor(), 2 * whole.detach())

    simulate(body, 64)


def test_failures_are_reported_and_end_the_simulation() -> None:
    def body() -> None:
        mesh = row_major_mesh((8,))
        if mesh.get_coordinate() == (5,):
            raise KeyError("only on rank five")
        distribute_tensor(torch.zeros(8), mesh, (RaggedShard(),)).full_tensor()

    with pytest.raises(SimulationError, match=r"(?s)simulated rank 5 of 8.*only on rank five"):
        simulate(body, 8, timeout=20.0)
    assert simulate(lambda: torch.distributed.get_world_size(), 3) == [3, 3, 3]
