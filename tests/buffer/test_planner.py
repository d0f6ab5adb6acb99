"""plan_layout against brute force over all orders, and its corner cases."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.buffer import oracle
from tests.examples import examples
from vescale.buffer import BufferPlan, Layout, plan_layout
from vescale.buffer._layout import earliest_start, last_end
from vescale.buffer._planner import plan_group
from vescale.buffer._shard_size_search import Bounds, Problem

Tensors = tuple[tuple[int, ...], tuple[int, ...]]


def tensors(pairs: list[tuple[int, int]]) -> Tensors:
    return tuple(numel for numel, _ in pairs), tuple(block for _, block in pairs)


@st.composite
def families(draw: st.DrawFn, most: int = 5, largest: int = 24) -> Tensors:
    """Lists that are hard in different ways."""
    numel = st.integers(0, largest)
    count = {"min_size": 0, "max_size": most}
    family = draw(st.sampled_from(["any", "equal", "coprime", "atomic", "fluid", "whole-shards", "short-last"]))
    if family == "any":
        return tensors(draw(st.lists(st.tuples(numel, st.integers(1, largest)), **count)))
    if family == "equal":  # few kinds with many tensors each
        kinds = draw(st.lists(st.tuples(numel, st.integers(1, 6)), min_size=1, max_size=2))
        return tensors(draw(st.lists(st.sampled_from(kinds), **count)))
    if family == "coprime":  # blocks whose lcm is far larger than each
        return tensors(draw(st.lists(st.tuples(numel, st.sampled_from([2, 3, 5, 7])), **count)))
    if family == "atomic":  # bin packing
        return tensors(draw(st.lists(st.tuples(numel, st.just(10**6)), **count)))
    if family == "fluid":
        return tensors(draw(st.lists(st.tuples(numel, st.sampled_from([1, 1, 1, 8])), **count)))
    if family == "whole-shards":  # one tensor as large as all others, in small blocks
        rest = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=most - 1))
        return tensors([(draw(st.integers(12, 2 * largest)), draw(st.integers(1, 4))), *rest])
    return tensors([(4 * n + 1, 4) for n in draw(st.lists(st.integers(0, largest // 4), **count))])


def checked(layout: Layout) -> Layout:
    oracle.check_layout(
        layout.numels,
        layout.blocks,
        layout.num_shards,
        layout.alignment,
        layout.shard_size,
        layout.offsets,
        layout.tensor_alignment,
    )
    assert layout.lower_bound <= layout.shard_size
    return layout


@given(families(), st.integers(1, 8), st.sampled_from([1, 1, 2, 3, 4]))
@settings(max_examples=examples(600), deadline=None)
@example(((), ()), 4, 8)
@example(((0, 0), (1, 5)), 3, 2)
@example(((1,), (100,)), 1, 1)
@example(((7, 0, 7), (3, 3, 3)), 8, 4)
def test_small_lists_are_optimal(lists: Tensors, num_shards: int, alignment: int) -> None:
    layout = checked(plan_layout(*lists, num_shards, alignment))
    assert layout.optimal
    assert layout.shard_size == oracle.smallest_shard(*lists, num_shards, alignment)
    default = checked(plan_layout(*lists, num_shards, alignment, order="default"))
    assert default.strategy in ("default", "empty")
    assert layout.shard_size <= default.shard_size
    assert default.lower_bound <= layout.shard_size
    starts = [offset for offset, numel in zip(default.offsets, lists[0], strict=True) if numel]
    assert starts == sorted(starts), "the default order keeps the caller's"


@given(families(most=4, largest=10), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.sampled_from([2, 3, 4]))
@settings(max_examples=examples(200), deadline=None)
def test_small_lists_with_aligned_tensors_are_optimal(
    lists: Tensors, num_shards: int, alignment: int, tensor_alignment: int
) -> None:
    layout = checked(plan_layout(*lists, num_shards, alignment, tensor_alignment=tensor_alignment))
    assert layout.shard_size == oracle.smallest_shard(*lists, num_shards, alignment, tensor_alignment)


@given(families(most=3, largest=7), st.integers(1, 4), st.integers(1, 12))
@settings(max_examples=examples(200), deadline=None)
def test_the_oracle_itself(lists: Tensors, num_shards: int, shard: int) -> None:
    """Placing each tensor as early as possible, in some order, loses nothing against any offsets at all."""
    pairs = [(n, b) for n, b in zip(*lists, strict=True) if n]
    assert oracle.fits(*tensors(pairs), num_shards, shard) == oracle.fits_anywhere(*tensors(pairs), num_shards, shard)


@given(families(), st.integers(1, 8), st.sampled_from([1, 2, 3, 4]))
@settings(max_examples=examples(300), deadline=None)
def test_bounds_never_exclude_what_fits(lists: Tensors, num_shards: int, alignment: int) -> None:
    pairs = [(n, b) for n, b in zip(*lists, strict=True) if n]
    if not pairs:
        return
    problem = Problem.normal(*tensors(pairs), num_shards, alignment, 1)
    bounds = Bounds(problem)
    smallest = bounds.smallest()
    for shard in range(alignment, sum(n for n, _ in pairs) + alignment, alignment):
        if oracle.fits(*tensors(pairs), num_shards, shard):
            assert bounds.allows(shard)
            assert smallest <= shard


@given(families(), st.integers(1, 40))
@settings(max_examples=examples(300), deadline=None)
@example(((5, 17), (1, 4)), 10)  # the head is too short here, and long enough in the next shard
@example(((5, 24), (1, 5)), 10)  # the second tensor contains a whole shard
@example(((5, 24), (1, 4)), 10)  # and here it would have to, but must not
def test_a_fixed_order_is_placed_as_early_as_possible(lists: Tensors, shard: int) -> None:
    """The formulas against trying every start, in the given order."""
    numels, blocks = tensors([(n, b) for n, b in zip(*lists, strict=True) if n])
    limit = 10 * shard
    end: int | None = 0
    for numel, block in zip(numels, blocks, strict=True):
        if end is not None:
            start = earliest_start(end, numel, block, shard)
            end = oracle.earliest_end(end, numel, block, shard, limit, 1)
            assert (end is None) == (start is None or start + numel > limit)
            assert end is None or start == end - numel
    assert last_end(numels, blocks, range(len(numels)), shard, limit) == end


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(2, 12),
    st.sampled_from([30, 100, 400, 2000]),
)
@settings(max_examples=examples(150), deadline=None)
def test_tables_that_are_too_large_still_give_valid_layouts(
    kinds: list[tuple[int, int, int]], num_shards: int, effort: int
) -> None:
    """Many equal tensors, also with short last blocks, at caps that force bundles, chains and dropped tensors."""
    lists = tensors([(numel, block) for numel, block, count in kinds for _ in range(count)])
    layout = checked(plan_layout(*lists, num_shards, 1, effort=effort))
    assert layout.shard_size <= plan_layout(*lists, num_shards, 1, order="default").shard_size
    best = checked(plan_layout(*lists, num_shards, 1, effort=3_000_000))
    assert layout.lower_bound <= best.shard_size <= layout.shard_size


@pytest.mark.parametrize("seed", range(12))
def test_twelve_tensors_are_optimal(seed: int) -> None:
    rng = random.Random(seed)
    numels = tuple(rng.randint(1, 40) for _ in range(12))
    blocks = tuple(rng.choice((1, 2, 3, 5, 8, 13, 50)) for _ in range(12))
    num_shards, alignment = rng.choice((2, 3, 5, 7, 9)), rng.choice((1, 2, 4))
    layout = checked(plan_layout(numels, blocks, num_shards, alignment))
    assert layout.optimal
    assert oracle.fits(numels, blocks, num_shards, layout.shard_size)
    for smaller in range(layout.shard_size - alignment, max(0, layout.shard_size - 12 * alignment), -alignment):
        assert not oracle.fits(numels, blocks, num_shards, smaller)


def large_lists() -> Iterator[tuple[Tensors, int]]:
    rng = random.Random(7)
    for n in (30, 200, 1000):
        yield tensors([(rng.randint(1, 10**6), rng.randint(1, 5000)) for _ in range(n)]), rng.randint(2, 999)
        kinds = [(rng.randint(1, 10**6), rng.choice((1, 1, 64, 4096, 10**7))) for _ in range(6)]
        yield tensors([rng.choice(kinds) for _ in range(n)]), rng.randint(2, 99)


@pytest.mark.parametrize(("lists", "num_shards"), list(large_lists()))
def test_large_lists_are_close_to_the_bound(lists: Tensors, num_shards: int) -> None:
    layout = checked(plan_layout(*lists, num_shards, 8, effort=200_000))
    default = checked(plan_layout(*lists, num_shards, 8, order="default"))
    assert layout.shard_size <= default.shard_size
    assert layout.shard_size <= 1.1 * layout.lower_bound


def test_sizes_beyond_every_machine_word() -> None:
    """The same problem, scaled: small, past 2^31, past what the C++ helper takes, and past 64 bits."""
    numels, blocks = (24, 24, 24, 30, 30, 7, 5), (6, 6, 6, 10, 10, 1, 1)
    small = plan_layout(numels, blocks, 4, 1)
    assert small.strategy.startswith("table")
    for bits in (31, 40, 57, 58, 59, 64, 200):
        scale = 1 << bits
        scaled = plan_layout([n * scale for n in numels], [b if b == 1 else b * scale for b in blocks], 4, scale)
        checked(scaled)
        assert scaled.optimal
        assert scaled.shard_size == small.shard_size * scale


def test_never_of_the_size_of_the_job() -> None:
    layout = checked_without_ranks(plan_layout((10**12, 3 * 10**9, 17), (4096, 300, 1), 10**9, 8))
    assert layout.num_shards == 10**9
    assert sum(count for count, _ in layout.local_units(0).runs) == 10**9
    assert layout.shard_slices(10**9 - 1) == []


def checked_without_ranks(layout: Layout) -> Layout:
    """For layouts with too many boundaries to visit: the constructor's own check, from JSON."""
    assert Layout.from_json(layout.to_json()) == layout
    return layout


@pytest.mark.parametrize("num_shards", [1, 2, 7])
@pytest.mark.parametrize("numels", [(), (0,), (0, 0, 0)])
def test_nothing_to_place(numels: tuple[int, ...], num_shards: int) -> None:
    layout = plan_layout(numels, (3,) * len(numels), num_shards, 8)
    assert (layout.shard_size, layout.lower_bound, layout.optimal, layout.padding_ratio) == (0, 0, True, 0.0)
    assert layout.shard_slices(num_shards - 1) == []
    assert all(list(layout.tensor_ranks(i)) == [] for i in range(len(numels)))
    assert all(layout.local_units(i).expand() == (0,) * num_shards for i in range(len(numels)))


def test_one_shard_and_more_shards_than_elements() -> None:
    assert plan_layout((5, 6), (5, 4), 1, 8).shard_size == 16
    lonely = plan_layout((3,), (1,), 1000, 8)
    assert lonely.shard_size == 8
    assert lonely.tensor_ranks(0) == range(1)
    whole = plan_layout((3,), (1000,), 1000, 1)
    assert whole.shard_size == 3


def test_aligned_tensors_start_aligned_and_shards_follow() -> None:
    layout = checked(plan_layout((10, 10, 10), (5, 4, 1), 2, 6, tensor_alignment=4))
    assert layout.shard_size % 12 == 0
    assert all(offset % 4 == 0 for offset in layout.offsets)


def test_arguments_of_other_integer_types() -> None:
    layout = plan_layout(np.array([4, 8]), [np.int64(2), np.int32(1)], np.int64(2), 2)
    assert layout == plan_layout((4, 8), (2, 1), 2, 2)
    assert all(type(n) is int for n in (*layout.numels, *layout.blocks, layout.num_shards))


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"numels": (4, -1)}, ValueError, ("numels[1] is -1", "at least 0")),
        ({"blocks": (1, 0)}, ValueError, ("blocks[1] is 0", "at least 1")),
        ({"blocks": (1,)}, ValueError, ("2 numels and 1 blocks", "Pass 1")),
        ({"numels": (4, 2.0)}, TypeError, ("numels[1] is 2.0 of type float", "int()")),
        ({"numels": (True, 2)}, TypeError, ("numels[0] is True",)),
        ({"numels": 5}, TypeError, ("numels is 5", "list")),
        ({"num_shards": 0}, ValueError, ("num_shards is 0", "at least 1")),
        ({"alignment": -8}, ValueError, ("alignment is -8",)),
        ({"tensor_alignment": 0}, ValueError, ("tensor_alignment is 0",)),
        ({"max_buffers": 0}, ValueError, ("max_buffers is 0",)),
        ({"order": "best"}, ValueError, ("'best'", "'auto' or 'default'")),
        ({"effort": "quick"}, ValueError, ("'quick'", "'thorough'")),
        ({"effort": 0}, ValueError, ("effort is 0", "positive")),
        ({"effort": True}, ValueError, ("effort is True",)),
        ({"effort": []}, ValueError, ("effort is []",)),
    ],
)
def test_bad_arguments(change: dict, error: type[Exception], parts: tuple[str, ...]) -> None:
    arguments = {"numels": (4, 2), "blocks": (1, 1), "num_shards": 2, "alignment": 1, **change}
    with pytest.raises(error) as caught:
        plan_layout(**arguments)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.helper("planner")
@given(families(most=9, largest=60), st.integers(2, 9), st.sampled_from([1, 2, 4]), st.sampled_from([30, 300, 10**6]))
@settings(max_examples=examples(150), deadline=None)
def test_the_helper_and_the_fallback_agree(lists: Tensors, num_shards: int, alignment: int, effort: int) -> None:
    """Everything, also the offsets, at every cap: also where the tables are bundled or left out."""
    both = []
    for off in ("", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VESCALE_NO_NATIVE", off)
            plan_group.cache_clear()
            both.append(plan_layout(*lists, num_shards, alignment, effort=effort))
    assert both[0] == both[1]
    plan_group.cache_clear()


def test_buffers_are_split_only_where_it_pays() -> None:
    # Unlike blocks: one buffer must suit both, two need no padding.
    plan = plan_layout((7 * 64, 9 * 64), (7, 9), 64, 1, max_buffers=2)
    assert isinstance(plan, BufferPlan)
    assert plan.assignment == (0, 1)
    assert plan.padding_ratio == 0
    assert plan_layout((7 * 64, 9 * 64), (7, 9), 64, 1).padding_ratio > 0.5
    # A third buffer has nothing to save, nor has a second one here.
    assert len(plan_layout((7 * 64, 9 * 64), (7, 9), 64, 1, max_buffers=5).layouts) == 2
    same = plan_layout((64, 64), (1, 1), 64, 1, max_buffers=2)
    assert same.assignment == (0, 0)
    assert plan_layout((), (), 4, 1, max_buffers=3).assignment == ()


@given(families(most=6), st.integers(1, 6), st.integers(2, 4))
@settings(max_examples=examples(100), deadline=None)
def test_several_buffers_hold_every_tensor_once(lists: Tensors, num_shards: int, max_buffers: int) -> None:
    plan = plan_layout(*lists, num_shards, 2, max_buffers=max_buffers)
    assert 1 <= len(plan.layouts) <= max_buffers
    for index, layout in enumerate(plan.layouts):
        members = [i for i, buffer in enumerate(plan.assignment) if buffer == index]
        assert layout.numels == tuple(lists[0][i] for i in members)
        assert layout.blocks == tuple(lists[1][i] for i in members)
        checked(layout)
    one = plan_layout(*lists, num_shards, 2)
    assert sum(layout.buffer_size for layout in plan.layouts) <= one.buffer_size


def test_the_plan_is_computed_once_and_is_the_same_object() -> None:
    arguments = ((4, 5, 6), (2, 5, 1), 3, 2)
    assert plan_layout(*arguments) is plan_layout(*arguments)
    assert len({plan_layout(*arguments), plan_layout(*map(list, arguments[:2]), 3, 2)}) == 1


def test_orders_do_not_matter_to_the_size() -> None:
    pairs = [(12, 4), (12, 4), (9, 3), (7, 1), (20, 20)]
    sizes = {plan_layout(*tensors(list(order)), 3, 2).shard_size for order in itertools.permutations(pairs)}
    assert len(sizes) == 1
