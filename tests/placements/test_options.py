"""The arguments of redistribute, from_local, to_local and full_tensor together, on random placements and meshes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Partial

from tests.placements.on_ranks import Source, make_mesh, sample
from tests.placements.specs import draw_placements, draw_shape
from tests.ranks import RankPools, run_cases
from vescale.placements import from_local, has_custom, redistribute, to_local

# Small integers, and their sums over 8 ranks, are exact in all of them.
DTYPES = (None, torch.float64, torch.bfloat16, torch.float16)


def through(
    mesh_ranks: Any,
    shape: tuple[int, ...],
    source: tuple[Any, ...],
    target: tuple[Any, ...],
    options: dict[str, Any],
    pending: tuple[bool, ...],
    as_method: bool,
    seed: int,
) -> None:
    """leaf -> from_local -> redistribute -> to_local -> weighted sum. On the axes of ``pending`` where the target is
    Replicate, each coordinate's loss has weights of its own, and ``grad_placements`` says so."""
    mesh = make_mesh(mesh_ranks)
    tensor = Source(mesh, shape, source, torch.float32, seed)
    leaf = tensor.local.clone().requires_grad_()
    placed = from_local(leaf, mesh, source, shape=shape, stride=torch.empty(shape, device="meta").stride())
    if as_method:
        moved = placed.redistribute(placements=target, **options)
    else:
        moved = redistribute(placed, placements=target, **options)
    gradient = [
        Partial() if p.is_replicate() and summed else Replicate() if p.is_partial() else p
        for p, summed in zip(moved.placements, pending)
    ]
    part = to_local(moved, grad_placements=gradient)
    values = part.detach() + 0
    communicated = options.get("forward_dtype") or torch.float32
    context = f"{shape} {source} -> {moved.placements} {options}"
    assert moved.dtype == communicated and moved.shape == shape, context
    tensor.logical = tensor.logical.to(communicated)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        tensor.local = tensor.local.to(communicated)
    tensor.check(values, moved.placements, context)

    # Everyone's weights, so that the sum over the pending axes is known here.
    summed_axes = [a for a, (p, yes) in enumerate(zip(moved.placements, pending)) if p.is_replicate() and yes]
    own = [0 if coordinate is None else coordinate[axis] for axis in summed_axes]
    sizes = [mesh.size(axis) for axis in summed_axes]
    contributions = {
        index: sample(shape, torch.float32, seed + 100 + sum(c * 10**n for n, c in enumerate(index)))
        for index in itertools.product(*map(range, sizes))
    }
    back = tuple(Replicate() if p.is_partial() else p for p in placed.placements)
    there = tuple(Replicate() if p.is_partial() else p for p in moved.placements)
    if coordinate is None:
        return
    weight = tensor.expected(there, contributions[tuple(own)])
    (part * weight.to(part.dtype)).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.float32, context
    total = sum(contributions.values())
    assert isinstance(total, torch.Tensor)
    assert torch.equal(leaf.grad + 0, tensor.expected(back, total)), f"{context}: gradient"


def random_options(mesh_ranks: Any, seed: int, count: int) -> int:
    rng = random.Random(seed)
    mesh_shape = tuple(torch.tensor(mesh_ranks).shape)
    cases: list[tuple[Any, ...]] = []
    while len(cases) < count:
        shape = draw_shape(rng, max_numel=80)
        source = draw_placements(rng, shape, mesh_shape, partial_ops=("sum",) if rng.random() < 0.5 else ())
        target = draw_placements(rng, shape, mesh_shape, partial_ops=("sum",) if rng.random() < 0.2 else ())
        if not shape or not has_custom((*source, *target)):
            continue
        options: dict[str, Any] = {}
        for name, choices in {"async_op": (True, False), "forward_dtype": DTYPES, "backward_dtype": DTYPES}.items():
            if rng.random() < 0.6:
                options[name] = rng.choice(choices)  # type: ignore[arg-type]
        pending = tuple(rng.random() < 0.5 for _ in mesh_shape)
        cases.append((mesh_ranks, shape, source, target, options, pending, rng.random() < 0.5, len(cases)))
    return run_cases(through, cases)


@pytest.mark.parametrize(
    "mesh_ranks", [(0, 1, 2), (2, 0, 3, 1), (1, 3), ((0, 1), (2, 3)), (((0, 1), (2, 3)), ((4, 5), (6, 7)))], ids=str
)
def test_random_options(ranks: RankPools, mesh_ranks: Any) -> None:
    ranks.run(random_options, mesh_ranks, 3, 40, world_size=int(torch.tensor(mesh_ranks).max()) + 1)
