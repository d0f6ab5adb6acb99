"""Attention on DTensors against one device: every sensible placement, grouped heads, masks, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from tests.ops.attend import Attend, attend_like_one_device
from tests.ranks import RankPools, run_cases
from tests.runtime.llama import make_mesh
from vescale import parallelize
from vescale.plans import Plan
from vescale.runtime import implicit_communication

R, BATCH, HEADS, SEQUENCE = Replicate(), Shard(0), Shard(1), Shard(2)


def tensors(heads: int, kv_heads: int, mask: str) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, heads, 6, 4), (4, kv_heads, 6, 4), (4, kv_heads, 6, 4)]
    made: list[torch.Tensor | None] = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in shapes
    ]
    shape = {"batch": (4, 1, 6, 6), "heads": (1, heads, 6, 6), "both": (4, heads, 6, 6), "plain": (6, 6)}.get(mask)
    bias = torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() if shape else None
    if mask == "bool":
        bias = torch.ones(4, 1, 6, 6, dtype=torch.bool).tril()
    return [*made, bias]


def attend(
    mesh: Any, placed: Sequence[Any], heads: int, kv_heads: int, mask: str, options: dict[str, Any], explicit: bool
) -> None:
    model = Attend(options)
    plan = Plan(mesh)
    for name, placements in zip(("q", "k", "v", "mask"), placed):
        if placements is not None:
            plan.shard(f"<in:{name}>", dict(zip(("dp", "tp"), placements)))
    parallelize(model, plan, strict=explicit)
    expected_in, found_in = tensors(heads, kv_heads, mask), tensors(heads, kv_heads, mask)
    attend_like_one_device(model, options, expected_in, found_in)
    assert bool(implicit_communication(model)) == (not explicit)


def without_communication() -> int:
    mesh = make_mesh(dp=2, tp=2)
    layouts = [(BATCH, HEADS), (R, HEADS), (BATCH, R), (R, R), (HEADS, BATCH), (BATCH, BATCH)]
    cases: list[Any] = [
        (mesh, [p, p, p], 4, 4, "", {"is_causal": causal}, True)
        for p, causal in itertools.product(layouts, (False, True))
    ]
    cases += [(mesh, [p, p, p], 4, 2, "", {"enable_gqa": True, "scale": 0.3}, True) for p in layouts]
    # fewer key/value heads than ranks: replicated, each rank takes its own
    cases += [
        (mesh, [(BATCH, HEADS), (BATCH, R), (BATCH, R)], 4, kv, "", {"enable_gqa": kv < 4}, True) for kv in (1, 2, 4)
    ]
    cases += [(mesh, [(R, R), (BATCH, HEADS), (BATCH, HEADS)], 4, 4, "", {}, True)]
    # masks: whole, sharded alike, broadcast
    for mask, placements in itertools.product(("batch", "heads", "both", "plain", "bool"), (None, (R, R))):
        cases.append((mesh, [(BATCH, HEADS)] * 3 + [placements], 4, 4, mask, {}, True))
    cases.append((mesh, [(BATCH, HEADS)] * 3 + [(BATCH, R)], 4, 4, "batch", {}, True))
    cases.append((mesh, [(BATCH, HEADS)] * 3 + [(R, HEADS)], 4, 4, "heads", {}, True))
    cases.append((mesh, [(BATCH, HEADS)] * 3 + [(BATCH, HEADS)], 4, 4, "both", {}, True))
    return run_cases(attend, cases)


def with_communication() -> int:
    mesh = make_mesh(dp=2, tp=2)
    cases = [
        (mesh, [(BATCH, SEQUENCE)] * 3, 4, 4, "", {"is_causal": True}, False),
        (mesh, [(BATCH, HEADS), (HEADS, BATCH), (BATCH, HEADS)], 4, 4, "", {}, False),
    ]
    return run_cases(attend, cases)


def test_attention_without_communication(ranks: RankPools) -> None:
    assert set(ranks.run(without_communication)) == {35}


def test_attention_gathers_what_it_cannot_split(ranks: RankPools) -> None:
    ranks.run(with_communication)


def uneven_heads() -> None:
    """Three heads over two ranks, and six query heads that share two over four."""
    attend(make_mesh(dp=1, tp=4), [(R, HEADS), (R, R), (R, R)], 8, 2, "", {"enable_gqa": True}, True)
    attend(make_mesh(dp=2, tp=2), [(BATCH, HEADS)] * 3, 3, 3, "", {}, True)
    attend(make_mesh(dp=1, tp=4), [(R, HEADS), (R, R), (R, R)], 6, 2, "", {"enable_gqa": True}, True)


def test_uneven_heads(ranks: RankPools) -> None:
    ranks.run(uneven_heads)


def attend_with_dropout(mesh: Any, placed: Sequence[Any], heads: int, kv_heads: int, mask: str, options: Any) -> None:
    """Values, gradients and the generator afterwards are those of one device, also where a rank has no heads."""
    options = {"dropout_p": 0.4, **options}
    model = Attend(options)
    plan = Plan(mesh)
    for name, placements in zip(("q", "k", "v", "mask"), placed):
        plan.shard(f"<in:{name}>", dict(zip(("dp", "tp"), placements)))
    parallelize(model, plan)
    expected_in, found_in = tensors(heads, kv_heads, mask), tensors(heads, kv_heads, mask)
    attend_like_one_device(model, options, expected_in, found_in)


def dropout() -> int:
    square, line = make_mesh(dp=2, tp=2), make_mesh(dp=1, tp=4)
    layouts = [(BATCH, HEADS), (R, HEADS), (BATCH, R), (R, R), (BATCH, BATCH), (HEADS, HEADS)]
    cases: list[Any] = [(square, [p] * 3, heads, heads, "", {}) for p in layouts for heads in (3, 4)]
    cases += [(square, [p] * 3, 4, 4, "", {"is_causal": True}) for p in layouts]
    cases.append((line, [(R, HEADS), (R, R), (R, R)], 6, 2, "", {"enable_gqa": True}))
    cases.append((line, [(R, HEADS)] * 3, 2, 2, "", {}))  # two ranks without heads
    cases.append((square, [(BATCH, HEADS)] * 3 + [(R, R)], 4, 4, "both", {}))
    return run_cases(attend_with_dropout, cases)


def test_dropout_on_split_axes_is_that_of_one_device(ranks: RankPools) -> None:
    assert set(ranks.run(dropout)) == {21}
