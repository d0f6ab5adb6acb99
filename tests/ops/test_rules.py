"""Ops on ragged and interleaved DTensors equal the same ops on full tensors on one device."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.device import device_type
from tests.examples import daily_sample
from tests.ops.layouts import (
    SHAPE,
    Layout,
    assert_same,
    data,
    interleaved_layouts,
    layouts,
    mesh_of,
    place,
    ragged_layouts,
    replicated,
    run_op,
    whole,
)
from tests.ranks import RankPools, run_cases
from vescale import rng
from vescale.comm import record_comms
from vescale.compat import local_of, make_dtensor, spec_of
from vescale.compat.model_hooks import model_hooks
from vescale.ops import Decision, PlacementFallbackError, PlacementFallbackWarning, register_rule, strict_placements
from vescale.ops._install import decide
from vescale.placements import InterleavedShard, RaggedShard, from_local, has_custom

functional = torch.nn.functional

# Every layout, no communication, the placement is kept.
UNARY: dict[str, Callable[[Any], Any]] = {
    "neg": lambda x: -x,
    "gelu": functional.gelu,
    "scalar": lambda x: 2 * x + 1,
    "rsub": lambda x: 1 - x,
    "pow": lambda x: x**2,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "compare": lambda x: x > 0,
    "isnan": lambda x: x.isnan(),
    "double": lambda x: x.double(),
    "bfloat16": lambda x: x.bfloat16(),
    "int": lambda x: (x * 4).to(torch.int64) + 1,
    "promote": lambda x: (x * 4).to(torch.int64) * 0.5,
    "detach": lambda x: x.detach(),
    "clone": lambda x: x.clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x: x.contiguous(),
    "deepcopy": copy.deepcopy,
    "zeros_like": torch.zeros_like,
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.int32),
    "full_like": lambda x: torch.full_like(x, 3.0, memory_format=torch.contiguous_format),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones": lambda x: x.new_ones(x.shape, dtype=torch.float64),
    "new_full": lambda x: x.new_full(x.shape, 7.0),
    "masked_fill": lambda x: x.masked_fill(x > 0, 9.0),
    "where scalar": lambda x: torch.where(x > 0, x, 0.0),
    "same view": lambda x: x.view(x.shape),
    "whole slice": lambda x: x[:],
    "nan_to_num": lambda x: (x / 0).nan_to_num(),
}


def in_place(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        target = x.clone()
        result = fn(target)
        assert result is target or not isinstance(result, torch.Tensor)
        return target

    return run


UNARY |= {
    name: in_place(fn)
    for name, fn in {
        "add_": lambda x: x.add_(1),
        "mul_": lambda x: x.mul_(2.0),
        "zero_": lambda x: x.zero_(),
        "fill_": lambda x: x.fill_(3.0),
        "clamp_": lambda x: x.clamp_(min=0),
        "lerp_": lambda x: x.lerp_(x * x, 0.25),
        "addcmul_": lambda x: x.addcmul_(x, x, value=0.5),
        "addcdiv_": lambda x: x.addcdiv_(x, x.abs() + 1, value=-2.0),
        "exp_": lambda x: x.exp_(),
        "masked_fill_": lambda x: x.masked_fill_(x > 0, -1.0),
        "mask assignment": lambda x: x.__setitem__(x > 0, 5.0),
        "data": lambda x: x.data.mul_(3) is None,
    }.items()
}

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "mul": lambda x, y: x * y,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, y),
    "lerp": lambda x, y: x.lerp(y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "compare": lambda x, y: x <= y,
    "copy_": lambda x, y: x.clone().copy_(y),
    "copy_ cast": lambda x, y: x.double().copy_(y),
    "add_": lambda x, y: x.clone().add_(y, alpha=0.5),
    "lerp_": lambda x, y: x.clone().lerp_(y, 0.1),
    "out": lambda x, y: torch.add(x, y, out=torch.zeros_like(x)),
    "where out": lambda x, y: torch.where(x > 0, x, y, out=torch.zeros_like(x)),
}

REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(),
    "sum of integers": lambda x: (x * 9).int().sum(),
    "sum with dims": lambda x: x.sum((0, 1), keepdim=True),
    "sum of halves": lambda x: x.bfloat16().sum(dtype=torch.float32),
    "mean": lambda x: x.mean(),
    "mean of halves": lambda x: x.bfloat16().mean(dtype=torch.float32),
    "prod": lambda x: x.prod(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin((0, 1)),
    "max of integers": lambda x: (x * 9).int().max(),
    "max with nan": lambda x: torch.where(x == x.min(), math.nan, x).max(),
    "any": lambda x: (x > 1).any(),
    "no any": lambda x: (x > 100).any(),
    "all": lambda x: (x > -100).all(),
    "isnan": lambda x: x.isnan().any(),
    "var": lambda x: x.var(),
    "std": lambda x: x.std(correction=0),
    "var_mean": lambda x: torch.var_mean(x),
    "std of halves": lambda x: x.bfloat16().float().std(),
    "nansum": lambda x: torch.where(x > 0, x, math.nan).nansum(),
    "count_nonzero": lambda x: (x > 0).count_nonzero(),
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(keepdim=True),
    "argmax of equals": lambda x: (x > -100).int().argmax(),
    "argmax at the end": lambda x: (x * 0 + torch.where(x == x.max(), 1.0, 0.0)).argmax(),
    "argmax with nan": lambda x: torch.where(x == x.min(), math.nan, x).argmax(),
    "argmax of -inf": lambda x: torch.full_like(x, -math.inf).argmax(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x.clone()),
    "allclose": lambda x: torch.allclose(x, x + 1e-9),
    "not allclose": lambda x: torch.allclose(x, x + 1),
}


def check_unary(name: str, layout: Layout) -> None:
    x = place(data(), layout)
    result = run_op(UNARY[name], x, fallback=False)
    assert_same(result, UNARY[name](data()))
    assert result.placements == x.placements, result.placements


def check_reduction(name: str, layout: Layout) -> None:
    with record_comms() as comms:
        x = place(data(), layout)
        before = len(comms.records)
        result = run_op(REDUCTIONS[name], x, fallback=False)
    assert_same(result, REDUCTIONS[name](data()))
    assert all(r.bytes <= 16 * r.num_ranks for r in comms.records[before:]), "a value of each rank at most"
    for one in result if isinstance(result, tuple) else (result,):
        assert not isinstance(one, DTensor) or all(p.is_replicate() for p in one.placements)


def check_binary(name: str, layout: Layout, other: Any) -> None:
    """The result lies as the leader does, in either order of the operands."""
    x, y = place(data(), layout), place(data(1), layout, other)
    wanted = BINARY[name](data(), data(1))
    result = run_op(BINARY[name], x, y, fallback=False)
    assert_same(result, wanted)
    assert result.placements == x.placements
    if not name.endswith(("_", "cast", "out")):
        swapped = run_op(BINARY[name], y, x, fallback=False)
        assert_same(swapped, BINARY[name](data(1), data()))
        if not has_custom(y.placements):
            assert swapped.placements == x.placements


def on_rank_unary(world: int) -> int:
    return run_cases(check_unary, daily_sample(itertools.product(UNARY, layouts(world))))


def on_rank_reductions(world: int) -> int:
    return run_cases(check_reduction, daily_sample(itertools.product(REDUCTIONS, layouts(world))))


def on_rank_binary(world: int) -> int:
    cases = []
    for layout in layouts(world):
        mesh_shape = layout[0]
        others: list[Any] = [replicated(layout), [Replicate()] * (len(mesh_shape) - 1) + [Shard(1)]]
        others += [p for shape, p in layouts(world)[1::6] if shape == mesh_shape][:1]
        cases += [(name, layout, other) for name in BINARY for other in others]
    return run_cases(check_binary, daily_sample(cases))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_unary_ops_are_local_and_keep_the_placement(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_unary, world, world_size=world)


@pytest.mark.parametrize("world", [2, 4])
def test_reductions(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_reductions, world, world_size=world)


@pytest.mark.parametrize("world", [4])
def test_operands_placed_differently_follow_the_leader(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_binary, world, world_size=world)


def check_broadcast(layout: Layout, shape: tuple[int, ...], placed: str) -> None:
    """An operand of another shape; a ragged one is gathered, which is reported."""
    small = data(3, shape)
    if placed == "ragged":
        units = [0] * layout[0][0]
        units[-1] = shape[0] if shape else 1
        other = place(small, layout, [RaggedShard((0,), units), *[Replicate()] * (len(layout[0]) - 1)])
    else:
        other = place(small, layout, replicated(layout))
    x = place(data(), layout)
    fallback = placed == "ragged" and math.prod(shape) > 1
    for fn in (lambda a, b: a * b, lambda a, b: b - a, lambda a, b: a.clone().add_(b)):
        result = run_op(fn, x, other, fallback=fallback)
        assert_same(result, fn(data(), small))
        assert result.placements == x.placements


def on_rank_broadcast(world: int) -> int:
    cases = [
        (layout, shape, placed)
        for layout in layouts(world)
        for shape in ((6,), (8, 1), (1, 6), (1, 1), (1,), ())
        for placed in ("replicated", "ragged")
        if not (placed == "ragged" and not shape)
    ]
    count = run_cases(check_broadcast, daily_sample(cases))
    for layout in ragged_layouts(world):  # the ragged operand is the one that is broadcast
        small = place(data(3, (6,)), ((world,), ()), [RaggedShard()])
        result = run_op(lambda a, b: a + b, small, place(data(), ((world,), ()), [Shard(0)]), fallback=True)
        assert_same(result, data(3, (6,)) + data())
        assert layout
    return count


@pytest.mark.parametrize("world", [4])
def test_broadcasting(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_broadcast, world, world_size=world)


def on_rank_partial() -> None:
    """A pending sum passes through what is linear in it, and is reduced before anything else."""
    mesh = mesh_of((2, 2))
    ragged = RaggedShard((0,), (3, 5))
    rows = slice(0, 3) if mesh.get_coordinate()[0] == 0 else slice(3, 8)
    share = data(mesh.get_coordinate()[1])
    total = data(0) + data(1)
    pending = from_local(share[rows].reshape(-1), mesh, (ragged, Partial()), shape=SHAPE)
    settled = place(data(5), ((2, 2), ()), (ragged, Replicate()))
    kept: list[tuple[Any, torch.Tensor]] = [
        (pending + pending, total + total),
        (pending + settled, total + data(5)),  # what is whole is one more contribution, of the first rank
        (settled - pending, data(5) - total),
        (pending * 2.0, total * 2),
        (pending / 2.0, total / 2),
        (pending * settled, total * data(5)),
        (settled * pending, total * data(5)),
        (-pending, -total),
        (pending.clone(), total),
        (pending.clone().zero_(), total * 0),
    ]
    for actual, expected in kept:
        assert actual.placements == (ragged, Partial()), actual.placements
        assert_same(actual, expected)
    reduced: list[tuple[Any, torch.Tensor]] = [
        (pending + 1, total + 1),
        (pending.exp(), total.exp()),
        (pending * pending, total * total),
        (settled / pending, data(5) / total),
        (torch.ones_like(pending), torch.ones(SHAPE)),
    ]
    for actual, expected in reduced:
        assert actual.placements == (ragged, Replicate()), actual.placements
        assert_same(actual, expected)
    assert_same(pending.sum(), total.sum())
    assert_same(pending.norm(), total.norm())
    accumulated = pending.clone()
    accumulated.add_(pending)
    assert accumulated.placements == (ragged, Partial())
    accumulated.add_(settled)
    assert accumulated.placements == (ragged, Partial())
    assert_same(accumulated, total * 2 + data(5))
    accumulated.exp_()
    assert accumulated.placements == (ragged, Partial())
    assert_same(accumulated, (total * 2 + data(5)).exp())


def test_partial_operands(ranks: RankPools) -> None:
    ranks.run(on_rank_partial, world_size=4)


ROWWISE: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(1),
    "sum keepdim": lambda x: x.sum(-1, keepdim=True),
    "mean": lambda x: x.mean(1),
    "amax": lambda x: x.amax(1),
    "max": lambda x: x.max(1),
    "argmin": lambda x: x.argmin(1),
    "any": lambda x: (x > 1).any(1),
    "all": lambda x: (x > -1).all(dim=1, keepdim=True),
    "norm": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "std": lambda x: x.std(1),
    "sum dim 0": lambda x: x.sum(0),
    "mean dim 0": lambda x: x.mean(0),
    "norm dim 0": lambda x: x.norm(dim=0),
    "amin dim 0": lambda x: x.amin(0),
    "softmax": lambda x: x.softmax(1),
    "softmax dim 0": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0),
}


def check_rowwise(name: str, layout: Layout) -> None:
    result = run_op(ROWWISE[name], place(data(), layout), fallback=True)
    assert_same(result, ROWWISE[name](data()))


def on_rank_rowwise(world: int) -> int:
    return run_cases(check_rowwise, list(itertools.product(ROWWISE, layouts(world))))


@pytest.mark.parametrize("world", [1, 4])
def test_reductions_over_dims(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_rowwise, world, world_size=world)


def on_rank_rows_stay(world: int) -> None:
    """Whole rows on each rank: no communication, the result is ragged with the same runs of rows."""
    full = data(0, (8, 3, 2))
    x = place(full, ragged_layouts(world)[0])
    ops: list[Callable[[Any], Any]] = [
        lambda t: t.sum((1, 2)),
        lambda t: t.mean(1),
        lambda t: t.amax(2, keepdim=True),
        lambda t: t.flatten(1).argmax(1),
    ]
    with record_comms() as comms, strict_placements():
        results = [op(x) for op in ops]
    assert not comms.records
    for op, result in zip(ops, results):
        assert isinstance(result.placements[0], RaggedShard)
        assert_same(result, op(full))
    nothing = torch.zeros(8, 0, 2)  # rows without elements
    for op in (lambda t: t.sum((1, 2)), lambda t: t.sum(1), lambda t: (t > 0).any(1), lambda t: t.sum(2)):
        assert_same(run_op(op, place(nothing, ragged_layouts(world)[0]), fallback=True), op(nothing))


def test_whole_rows_are_reduced_where_they_lie(ranks: RankPools) -> None:
    ranks.run(on_rank_rows_stay, 4, world_size=4)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(),
    "view": lambda x: x.view(4, 12),
    "split rows": lambda x: x.view(2, 4, 6),
    "split columns": lambda x: x.view(8, 3, 2),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze last": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "reshape": lambda x: x.reshape(-1, 3),
    "transpose": lambda x: x.t(),
    "permute": lambda x: x.view(8, 3, 2).permute(2, 0, 1),
    "select": lambda x: x[3],
    "slice": lambda x: x[2:5],
    "slice columns": lambda x: x[:, 1:4],
    "split": lambda x: x.split([3, 5]),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(1),
    "expand": lambda x: x.unsqueeze(0).expand(3, 8, 6),
    "cat": lambda x: torch.cat([x, x]),
    "stack": lambda x: torch.stack([x, x]),
    "flip": lambda x: x.flip(0),
    "matmul": lambda x: x @ x.t(),
    "repeat": lambda x: x.repeat(2, 1),
}
ORDER_KEPT = ("flatten", "view", "split rows", "split columns", "unsqueeze", "unsqueeze last", "squeeze", "reshape")


def check_view(name: str, layout: Layout) -> None:
    x = place(data(), layout)
    ragged_alone = isinstance(layout[1][0], RaggedShard) and all(p.is_replicate() for p in layout[1][1:])
    local_only = name in ORDER_KEPT and ragged_alone
    stock = [p if not has_custom([p]) else Replicate() for p in layout[1]]
    try:
        VIEWS[name](place(data(), layout, stock))
    except RuntimeError:  # not possible on the other axes' plain shards either
        return
    result = run_op(VIEWS[name], x, fallback=not local_only)
    assert_same(result, VIEWS[name](data()))
    if local_only:
        assert isinstance(result.placements[0], RaggedShard)
        result.mul_(2)  # a view: the write reaches the operand
        assert_same(x, data() * 2)


def on_rank_views(world: int) -> int:
    return run_cases(check_view, daily_sample(itertools.product(VIEWS, layouts(world))))


@pytest.mark.parametrize("world", [1, 4])
def test_views(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_views, world, world_size=world)


ROWS: dict[str, Callable[[Any], Any]] = {
    "select": lambda x: x[3],
    "last": lambda x: x[-1],
    "slice": lambda x: x[2:5],
    "nothing": lambda x: x[4:4],
    "split": lambda x: x.split([3, 5])[1],
    "chunk": lambda x: x.chunk(3)[2],
    "unbind": lambda x: x.unbind(0)[6],
    "narrow": lambda x: x.narrow(0, 1, 6),
    "one element": lambda x: x[2][3],
}


def check_rows(name: str, layout: Layout) -> None:
    """Rows of a ragged tensor are local views, whoever holds them, unless another axis cuts dim 0."""
    x, full = place(data(), layout), data()
    before = ROWS[name](full.clone())
    with record_comms() as comms, strict_placements():
        rows = ROWS[name](x)
    assert not comms.records
    assert_same(rows, before)
    rows.mul_(3)
    ROWS[name](full).mul_(3)
    assert_same(x, full)


def on_rank_rows(world: int) -> int:
    where = [layout for layout in ragged_layouts(world) if not any(isinstance(p, Shard) for p in layout[1])]
    where = [layout for layout in where if not any(isinstance(p, InterleavedShard) for p in layout[1])]
    count = run_cases(check_rows, list(itertools.product(ROWS, where)))
    if world == 2:  # units that fit the rows that are taken, and would mean others of them
        x = place(data(), ((2,), (RaggedShard((0,), (1, 3)),)))
        for rows in (slice(2, 6), slice(0, 4), slice(4, 8)):
            with strict_placements():
                assert_same(x[rows], data()[rows])
        narrow = place(data()[:, :4].contiguous(), ((2,), (RaggedShard((0, 1), (1, 1)),)))
        with strict_placements():
            assert_same(narrow[1:5], data()[1:5, :4])
            assert_same(narrow[6:], data()[6:, :4])
    if world == 4:  # columns are cut by another axis: rows are not
        columns = ((2, 2), (RaggedShard((0,), (3, 5)), Shard(1)))
        count += run_cases(check_rows, [(name, columns) for name in ROWS if name != "one element"])
        with strict_placements(), pytest.raises(PlacementFallbackError, match="slice"):
            place(data(), ((2, 2), (RaggedShard(), Shard(0))))[2:6]  # two rows of each half, but not the same two
    return count


@pytest.mark.parametrize("world", [1, 2, 4])
def test_rows_are_local_views(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_rows, world, world_size=world)


def check_assignment(name: str, layout: Layout) -> None:
    """An assignment reaches the tensor, or is refused on every rank: it is never written to a copy."""
    assign = ASSIGNMENTS[name]
    x, full = place(data(), layout), data()
    assign(full)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assign(x)
    except RuntimeError as error:  # stock DTensor has no fill_ with a tensor: rows of one chunk are Shard(0)
        assert "an assignment to it would be lost" in str(error) or "fill_.Tensor" in str(error), error
        assert_same(x, data())
        assert not isinstance(layout[1][0], RaggedShard) or len(layout[0]) > 1 or name == "column"
    else:
        assert_same(x, full)


ASSIGNMENTS: dict[str, Callable[[Any], None]] = {
    "row": lambda x: x.__setitem__(0, 2.0),
    "rows": lambda x: x.__setitem__(slice(1, 4), -1.0),
    "column": lambda x: x.__setitem__((slice(None), 1), 5.0),
    "element": lambda x: x.__setitem__((2, 3), 7.0),
    "everything": lambda x: x.__setitem__(slice(None), 4.0),
    "row by row": lambda x: x.__setitem__(5, x[6]),
}


def on_rank_assignments(world: int) -> int:
    count = run_cases(check_assignment, list(itertools.product(ASSIGNMENTS, layouts(world))))
    x = place(torch.ones(1), ((world,), (InterleavedShard(0, 1),)))
    with pytest.raises(RuntimeError, match="would be lost"):  # a single number is moved without a warning
        x[0] = 2.0
    return count


@pytest.mark.parametrize("world", [1, 4])
def test_assignments_are_not_lost(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_assignments, world, world_size=world)


def on_rank_equal_specs() -> None:
    """Equal calls give the same spec object, by which the dispatcher finds its cached decisions fastest, and ops on tensors
    alone are cached there."""
    for layout in (ragged_layouts(2)[0], interleaved_layouts(2)[0]):
        a, b = place(data(), layout), place(data(1), layout)
        b = make_dtensor(local_of(b), copy.copy(spec_of(b)))  # as PyTorch makes specs, which vescale shares
        assert spec_of(a) is not spec_of(b)
        like = functools.partial(
            torch.zeros_like, memory_format=torch.preserve_format
        )  # as optimizers make their state
        for op in (torch.Tensor.detach, like):
            assert spec_of(op(a)) is spec_of(op(b))
        asked = decide.cache_info()
        assert_same(a.detach(), data())
        assert decide.cache_info() == asked


def test_equal_calls_share_their_specs(ranks: RankPools) -> None:
    ranks.run(on_rank_equal_specs, world_size=2)


def on_rank_arguments() -> None:
    """Arguments that decide the dtype of a result are told apart, although the dispatcher's cache leaves them out."""
    for layout in (ragged_layouts(2)[0], interleaved_layouts(2)[0]):
        full, other = (data() * 9).long(), (data(1) * 4).long().abs() + 1
        x, y = place(full, layout), place(other, layout)
        modes: tuple[Any, ...] = (None, "floor", "trunc")
        for mode in (*modes, *modes[::-1]):
            with strict_placements():
                assert_same(torch.div(x, y, rounding_mode=mode), torch.div(full, other, rounding_mode=mode))
        for alpha in (1, 2, 1):
            with strict_placements():
                assert_same(torch.add(x, y, alpha=alpha), torch.add(full, other, alpha=alpha))
        for number in (2, 2.5, 2, True):
            with strict_placements():
                assert_same(x * number, full * number)
                assert_same(torch._foreach_mul([x], number)[0], full * number)
        for dtype in (torch.float64, torch.int32, None, torch.float64):
            with strict_placements():
                assert_same(torch.ones_like(x, dtype=dtype), torch.ones_like(full, dtype=dtype))
                assert_same(x.sum(dtype=dtype), full.sum(dtype=dtype))
        for low in (1, 1.5, 1):
            with strict_placements():
                assert_same(torch.clamp(x, min=low), torch.clamp(full, min=low))
                assert_same(torch.sub(x, low), torch.sub(full, low))
                assert_same(torch._foreach_add([x], low)[0], full + low)
        floats, whole = place(data(), layout), data()
        for dtype in (torch.float64, torch.int32, None, torch.float64):
            with strict_placements():
                assert_same(torch.zeros_like(floats, dtype=dtype), torch.zeros_like(whole, dtype=dtype))
                assert_same(floats.sum(dtype=dtype), whole.sum(dtype=dtype))
                assert_same(floats.new_zeros(3, 2, dtype=dtype), whole.new_zeros(3, 2, dtype=dtype))
        for factor in (1, 2.5, 1):
            with strict_placements():
                assert_same(torch.add(floats, floats, alpha=factor), torch.add(whole, whole, alpha=factor))
                assert_same(torch.clamp(floats, min=factor), torch.clamp(whole, min=factor))
    full = torch.arange(60.0).reshape(5, 4, 3)
    cut = place(full, ((2,), (InterleavedShard(0, 2),)))
    for made in (cut.new_zeros(5, 4, 7), cut.new_full((5, 2, 3), 2.0), cut.new_ones(5, 4, 7)):
        assert made.placements == cut.placements  # where only sharded dims keep their sizes, as in DeepSeek's keys
    assert_same(cut.new_full((5, 2, 3), 2.0), full.new_full((5, 2, 3), 2.0))
    for size in ((4, 4, 3), (5, 4), (5, 4, 3, 1)):
        assert cut.new_zeros(size).placements == (Replicate(),)
    whole = torch.arange(96.0).reshape(4, 2, 3, 4)
    images = place(whole, ((2,), (InterleavedShard(0, 2),)))
    for order in (torch.preserve_format, torch.channels_last, torch.preserve_format):
        with strict_placements():
            made = torch.zeros_like(images, memory_format=order)
        assert made.stride() == torch.zeros_like(whole, memory_format=order).stride()


def test_arguments_that_decide_a_dtype(ranks: RankPools) -> None:
    ranks.run(on_rank_arguments, world_size=2)


def on_rank_refusals() -> None:
    """What one device refuses for a dtype is refused on every rank alike, also where a rank holds nothing."""
    ops: dict[str, Callable[[Any], Any]] = {
        "norm": lambda x: torch.linalg.vector_norm(x, 1),
        "foreach norm": lambda x: torch._foreach_norm([x], 1),
        "max": lambda x: x.max(),
        "amax of rows": lambda x: x.amax(1),
        "argmax": lambda x: x.argmax(),
        "var": lambda x: x.var(),
        "std of rows": lambda x: x.std(1),
        "foreach max": lambda x: torch._foreach_max([x]),
    }
    refused = 0
    for placement in (RaggedShard((), (0, 0, 1, 0)), RaggedShard((0,), (0, 3, 0, 3)), InterleavedShard(0, 3)):
        for dtype, (name, op) in itertools.product((torch.uint8, torch.bool, torch.complex64), ops.items()):
            full = data(0, (6, 2)).abs().to(dtype)
            outcomes: list[Any] = [None] * 4
            x = place(full, ((4,), (placement,)))
            try:
                expected = op(full)
            except (RuntimeError, NotImplementedError, TypeError):
                expected = None
            try:
                found, outcome = op(x), "a result"
            except (RuntimeError, NotImplementedError, TypeError) as error:
                found, outcome = None, f"{type(error).__name__}: {error}"
            dist.all_gather_object(outcomes, outcome)
            assert len(set(outcomes)) == 1, (name, dtype, placement, outcomes)
            assert (expected is None) == (found is None), (name, dtype, placement, outcome)
            refused += expected is None
            if expected is not None:
                assert_same(found, expected)
    assert refused > 12
    empty = place(torch.ones(0, 3), ((4,), (RaggedShard(),)))
    with pytest.raises((RuntimeError, IndexError)):
        empty.max()
    for placement in (RaggedShard(), InterleavedShard(0, 2)):
        for shape, dim in itertools.product(((0, 3), (3, 0), (8, 3)), (0, -1, None)):
            flags = place(torch.zeros(shape, dtype=torch.bool), ((4,), (placement,)))
            with pytest.raises(RuntimeError, match="does not support bool"):
                flags.argmax(dim)


def test_every_rank_refuses_what_one_device_refuses(ranks: RankPools) -> None:
    ranks.run(on_rank_refusals, world_size=4)


def _backward(fn: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    leaf = x.detach().requires_grad_()
    loss = fn(leaf)
    loss.backward()
    return loss.detach(), leaf.grad


LOSSES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: (x * 2).sum(),
    "mean": lambda x: (x * x).mean(),
    "norm": lambda x: x.norm(),
    "norm 1": lambda x: x.norm(1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3),
    "max": lambda x: x.max() * 3,
    "amin": lambda x: x.amin(),
    "prod": lambda x: x.prod(),
    "std": lambda x: x.std(),
    "rows": lambda x: x.sum(1).pow(2).sum(),
    "row maxima": lambda x: x.max(1).values.sum(),
    "view": lambda x: (x.view(6, 8) ** 2).sum(),
    "transpose": lambda x: (x.t() ** 3).sum(),
    "matmul": lambda x: (x @ x.t()).pow(2).sum(),
    "gelu": lambda x: functional.gelu(x).sum(),
    "where": lambda x: torch.where(x > 0.5, x, x * x).sum(),
    "log_softmax": lambda x: x.log_softmax(1)[:, 0].sum(),
    "clone": lambda x: (x.clone() * x.detach()).sum(),
    "lerp": lambda x: x.lerp(x * x, 0.3).sum(),
    "cast": lambda x: (x.double() ** 2).sum(),
    "twice": lambda x: (x * x + x).sum() + x.norm(),
}


def check_backward(name: str, layout: Layout) -> None:
    value = data().abs() + 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, grad = _backward(LOSSES[name], place(value, layout))
    expected_loss, expected = _backward(LOSSES[name], value)
    assert_same(loss, expected_loss)
    assert_same(grad, expected)
    if name in ("mean", "norm", "gelu", "std", "where"):
        assert grad.placements == place(value, layout).placements


def on_rank_backward(world: int) -> int:
    where = layouts(world)[::2] if world == 4 else layouts(world)[:2]
    return run_cases(check_backward, daily_sample(itertools.product(LOSSES, where)))


@pytest.mark.parametrize("world", [3, 4])
def test_backward(ranks: RankPools, world: int) -> None:
    ranks.run(on_rank_backward, world, world_size=world)


def on_rank_fallback() -> None:
    rng.disable()  # an earlier case of this process may have enabled it
    layout = ragged_layouts(2)[0]
    x = place(data(), layout)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            result = x.flip(0)
        x.flip(0)
    assert_same(result, data().flip(0))
    reported = [str(w.message) for w in caught if issubclass(w.category, PlacementFallbackWarning)]
    assert len(reported) == 2, "one warning a call site"
    lines = [w.lineno for w in caught]
    assert all(w.filename == __file__ for w in caught) and lines[1] == lines[0] + 1
    assert "aten.flip.default has no rule for operand self of shape (8, 6) placed as (RaggedShard" in reported[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x.t()
    writes_through = model_hooks() is not None  # what models install brings writes to a copy back
    assert ("writes to it do not reach the operand" in str(caught[0].message)) != writes_through
    with record_comms() as comms, strict_placements():
        with pytest.raises(PlacementFallbackError, match=r"test_rules.py:\d+: aten.flip.default has no rule"):
            x.flip(0)
        with pytest.raises(PlacementFallbackError, match=r"aten\.t\.default"):
            x.t()
        x + x  # what has a rule is not concerned
    assert not comms.records
    written = x.clone()
    written.index_fill_(0, place(torch.tensor([1]), layout, [Replicate()]), 0.0)  # never a lost write
    assert_same(written, data().index_fill(0, torch.tensor([1]), 0.0))
    with pytest.raises(RuntimeError, match=r"vescale\.rng"):
        torch.ops.aten.exponential_(x.clone())
    with torch.inference_mode():
        assert_same(x + 1, data() + 1)
        assert_same(x.reshape(6, 8), data().reshape(6, 8))


def test_fallback_reports_once_a_site_or_raises(ranks: RankPools) -> None:
    ranks.run(on_rank_fallback, world_size=2)


def on_rank_register() -> None:
    ours = RaggedShard((0,), (4, 4))  # no other test's: a rule stays registered
    x = place(data(), ((2,), (ours,)))

    def keep(call: Any) -> Decision | None:
        (spec,) = call.operands
        if spec.placements != (ours,):
            return None
        return Decision((spec.placements,), (spec.placements,), local=lambda local, dims: local * 0)

    register_rule(torch.ops.aten.flip.default, keep)
    with strict_placements():
        assert_same(x.flip(0), data() * 0)


def test_registered_rules_come_first(ranks: RankPools) -> None:
    ranks.run(on_rank_register, world_size=2)


def on_rank_module() -> None:
    """Parameters, gradients, in-place updates and averages as a training script writes them."""
    for layout in layouts(4):
        parameter = torch.nn.Parameter(place(data(), layout))
        assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
        average = copy.deepcopy(parameter).detach()
        assert average.placements == parameter.placements and average.to_local() is not parameter.to_local()
        (parameter * parameter).sum().backward()
        assert parameter.grad is not None and parameter.grad.placements == parameter.placements
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
            average.lerp_(parameter, 0.5)
            parameter.data.mul_(2)
        expected = data() - 0.1 * 2 * data()
        assert_same(parameter.detach(), expected * 2)
        assert_same(average, data().lerp(expected, 0.5))
        parameter.grad = None
        assert not parameter.requires_grad_(False).requires_grad
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(place(data(), layout))
        twin = copy.deepcopy(module)
        module.double()
        assert module.weight.dtype == torch.float64 and module.weight.placements == twin.weight.placements
        assert_same(module.weight.detach(), data().double())
        twin.load_state_dict(module.state_dict())
        assert_same(twin.weight.detach(), data())
        assert whole(twin.weight).shape == SHAPE


def test_parameters(ranks: RankPools) -> None:
    ranks.run(on_rank_module, world_size=4)


def on_rank_add_to_pending() -> None:
    """In place: the gradients of two microbatches may be placed differently, and autograd adds them up."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device_type(), (world,))
    RaggedShard()  # the first placement teaches DTensor
    for full in (torch.arange(10.0), torch.arange(35.0).view(5, 7)):
        for dim in range(full.ndim):
            pending = DTensor.from_local(full * rank, mesh, [Partial()])
            with record_comms() as comms:
                pending += distribute_tensor(full, mesh, [Shard(dim)], src_data_rank=None)
            assert pending.placements == (Partial(),) and not comms.records
            assert torch.equal(pending.full_tensor(), full * (1 + sum(range(world))))


def test_a_shard_is_added_to_a_pending_sum(ranks: RankPools) -> None:
    ranks.run(on_rank_add_to_pending, world_size=3)


def on_rank_submesh() -> None:
    """Ranks outside the mesh take part in no communication and hold empty results."""
    mesh = torch.distributed.device_mesh.DeviceMesh(device_type(), [0, 2])
    from vescale.placements import distribute_tensor

    x = distribute_tensor(data(), mesh, [RaggedShard((0,), (3, 5))], src_data_rank=None)
    total, rows, flat = (x * 2 + x).sum(), x.sum(1), x.flatten()
    x.mul_(2)
    if mesh.get_coordinate() is not None:
        assert_same(total, (data() * 3).sum())
        assert_same(rows, data().sum(1))
        assert_same(flat, data().flatten() * 2)


def test_ranks_outside_the_mesh(ranks: RankPools) -> None:
    ranks.run(on_rank_submesh, world_size=3)


def test_interleaved_layouts_cover_both_dims() -> None:
    assert {p.dim for _, ps in interleaved_layouts(4) for p in ps if isinstance(p, InterleavedShard)} == {0, 1}
