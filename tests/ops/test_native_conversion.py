"""Conversions in C++ give what Python's give: values, gradients, derivatives of gradients, and what the ledger says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.ranks import RankPools, run_cases
from vescale.comm import record_comms
from vescale.compat import extend_dtensor, is_native, local_of, make_dtensor, make_spec, spec_of
from vescale.compat.native_dispatch import without_native
from vescale.ops import convert
from vescale.placements import contiguous_stride, own_region

Placements = tuple[Placement | None, ...]
P, R, S0, S1 = Partial(), Replicate(), Shard(0), Shard(1)
SHAPE = (6, 5)

# Mesh, placements, target, and what the gradient is brought to first and last.
CASES: list[tuple[tuple[int, ...], Placements, Placements, Placements | None, Placements | None]] = [
    ((2,), (R,), (R,), None, None),
    ((2,), (P,), (R,), None, None),
    ((2,), (Partial("avg"),), (R,), None, None),
    ((2,), (Partial("max"),), (R,), None, None),
    ((2,), (P,), (S0,), None, None),
    ((2,), (S1,), (R,), None, (S1,)),
    ((2,), (R,), (R,), (P,), (R,)),
    ((2,), (R,), (R,), None, (P,)),
    ((2,), (S0,), (None,), None, None),
    ((2, 1), (P, P), (R, R), None, None),
    ((1, 2), (P, S0), (R, None), None, None),
    ((1, 2), (R, P), (None, R), (None, P), (R, None)),
]


def observe(x: DTensor, case: tuple[Any, ...], twice: bool) -> list[Any]:
    _, _, target, grad_source, grad_target = case
    leaf = x.detach().requires_grad_()
    with record_comms() as ledger:
        made = convert(leaf * 2, target, grad_source=grad_source, grad_target=grad_target, requester="here")
        assert made.grad_fn is not None
        before = spec_of(made).placements
        gradient = make_dtensor(torch.sin(local_of(made).detach()), spec_of(made))
        (first,) = torch.autograd.grad((made * made), leaf, gradient, create_graph=twice)
        found = [before, local_of(made), spec_of(first).placements, local_of(first)]
        if twice:
            (second,) = torch.autograd.grad(first, leaf, make_dtensor(torch.ones_like(local_of(first)), spec_of(first)))
            found += [spec_of(second).placements, local_of(second)]
    return [*found, [(r.op, r.bytes, r.requester) for r in ledger.records]]


def equal_pythons(*case: Any) -> None:
    shape, placements, *_ = case
    extend_dtensor()
    assert is_native()
    mesh = init_device_mesh(device_type(), shape)
    region = own_region(SHAPE, placements, mesh)
    assert region is not None
    torch.manual_seed(dist.get_rank())
    local = torch.rand(region.local_shape) + 0.5
    x = make_dtensor(local, make_spec(mesh, placements, SHAPE, contiguous_stride(SHAPE), local.dtype))
    for twice in (False, True):
        with without_native():
            expected = observe(x, case, twice)
        for _ in range(2):  # what to do is asked once, then looked up
            for a, b in zip(observe(x, case, twice), expected, strict=True):
                if isinstance(a, torch.Tensor):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
                else:
                    assert a == b
        silent = convert(x, case[2])  # without a ledger C++ starts the collective
        torch.testing.assert_close(local_of(silent) * 2, expected[1], rtol=0, atol=0)
        assert silent is not x


@pytest.mark.helper("dispatch")
def test_conversions_equal_pythons(ranks: RankPools) -> None:
    assert set(ranks.run(run_cases, equal_pythons, CASES, world_size=2)) == {len(CASES)}
