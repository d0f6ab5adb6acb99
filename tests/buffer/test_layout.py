"""Layout: validation, the three views of a cut, JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.buffer.test_planner import Tensors, families
from tests.examples import examples
from vescale.buffer import Layout, ShardSlice, plan_layout


def layout(**change: object) -> Layout:
    """Two tensors of 12 and 9 elements over 4 shards of 8: the first has rows of 4, the second may be cut anywhere."""
    fields = {
        "numels": (12, 9, 0),
        "blocks": (4, 1, 1),
        "num_shards": 4,
        "alignment": 2,
        "shard_size": 8,
        "offsets": (4, 17, 0),
        "lower_bound": 6,
        "strategy": "by hand",
    }
    return Layout(**{**fields, **change})


def test_slices_ranks_and_units_of_one_layout() -> None:
    example = layout()
    assert [example.shard_slices(rank) for rank in range(4)] == [
        [ShardSlice(0, 0, 4, 4)],
        [ShardSlice(0, 4, 12, 0)],
        [ShardSlice(1, 0, 7, 1)],
        [ShardSlice(1, 7, 9, 0)],
    ]
    assert example.tensor_ranks(0) == range(2)
    assert example.local_units(0).runs == ((1, 1), (1, 2), (2, 0))
    assert example.local_units(1).runs == ((2, 0), (1, 7), (1, 2))
    assert example.local_units(2).expand() == (0, 0, 0, 0)
    assert example.padding == 32 - 21
    assert example.padding_ratio == 11 / 21
    assert not example.optimal
    assert layout(lower_bound=8).optimal


@given(families(most=6), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 1, 3]))
@settings(max_examples=examples(200), deadline=None)
def test_the_views_agree(lists: Tensors, num_shards: int, alignment: int, tensor_alignment: int) -> None:
    """Every element is on exactly one rank, and slices, ranks and units tell the same story."""
    plan = plan_layout(*lists, num_shards, alignment, tensor_alignment=tensor_alignment)
    held: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(len(lists[0]))}
    for rank in range(num_shards):
        for part in plan.shard_slices(rank):
            assert plan.offsets[part.tensor] + part.begin == rank * plan.shard_size + part.local_offset
            held[part.tensor].append((rank, part.begin, part.end))
    for i, (numel, block) in enumerate(zip(*lists, strict=True)):
        assert [rank for rank, _, _ in held[i]] == list(plan.tensor_ranks(i))
        assert [0, *(end for _, _, end in held[i])] == [*(begin for _, begin, _ in held[i]), numel]
        units = plan.local_units(i)
        expected = [0] * num_shards
        for rank, begin, end in held[i]:
            assert begin % block == 0
            expected[rank] = -(-(end - begin) // block)
        assert units.expand() == tuple(expected)
        assert sum(expected) == -(-numel // block)
        assert (units.numel, units.block) == (numel, block)
        assert len(units.runs) <= 5


@given(families(), st.integers(1, 5))
@settings(max_examples=examples(50), deadline=None)
def test_json_round_trip(lists: Tensors, num_shards: int) -> None:
    plan = plan_layout(*lists, num_shards, 2)
    read = Layout.from_json(plan.to_json())
    assert read == plan
    assert hash(read) == hash(plan)
    assert read.digest == plan.digest


def test_the_digest_is_of_the_geometry() -> None:
    assert layout(strategy="other", lower_bound=1).digest == layout().digest
    assert layout(offsets=(4, 18, 0)).digest != layout().digest
    assert layout(blocks=(2, 1, 1)).digest != layout().digest
    assert layout().digest == "e52925c675437c34", "a digest is compared between hosts: its definition must not drift"


def test_layouts_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout().shard_size = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"offsets": (4, 15, 0)}, ("tensor 1 (9 elements in blocks of 1) at offset 15", "overlaps tensor 0", "16")),
        ({"offsets": (2, 17, 0)}, ("tensor 0", "divided by the shard boundary at 8", "inside one of its blocks")),
        ({"offsets": (4, 24, 0)}, ("tensor 1", "past the buffer of 32", "4 shards of 8")),
        ({"numels": (12, 9)}, ("2 numels, 3 blocks and 3 offsets",)),
        ({"shard_size": 9}, ("shard_size 9", "multiple of alignment 2", "10")),
        ({"tensor_alignment": 3}, ("shard_size 8", "tensor_alignment 3", "12")),
        ({"tensor_alignment": 4}, ("tensor 1", "tensor_alignment 4")),
        ({"offsets": (4, 17, 33)}, ("tensor 2 (empty)", "33", "Use offset 0")),
        ({"offsets": (4, -1, 0)}, ("offsets[1] is -1",)),
        ({"lower_bound": 9}, ("lower_bound 9", "shard_size 8")),
        ({"num_shards": 0}, ("num_shards is 0",)),
        ({"blocks": (4, 0, 1)}, ("blocks[1] is 0",)),
    ],
)
def test_invalid_layouts(change: dict, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        layout(**change)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_cut_at_a_later_boundary_is_found() -> None:
    """The first boundary is legal, the second one is not: block 4 does not divide the shard."""
    with pytest.raises(ValueError, match="boundary at 20, inside"):
        layout(numels=(24,), blocks=(4,), shard_size=10, offsets=(2,), num_shards=4)


def test_ranks_and_tensors_out_of_range() -> None:
    for rank in (-1, 4):
        with pytest.raises(IndexError, match="0 to 3"):
            layout().shard_slices(rank)
    for tensor in (-1, 3):
        for view in (layout().tensor_ranks, layout().local_units):
            with pytest.raises(IndexError, match="3 tensors"):
                view(tensor)


def changed(**change: object) -> str:
    return json.dumps({**json.loads(layout().to_json()), **change})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not JSON"),
        ("[]", "not a layout"),
        ('{"format": "other"}', "not a layout"),
        (changed(version=2), "version 1"),
        (changed(extra=1), "unknown ['extra']"),
        (json.dumps({"format": "vescale.layout", "version": 1}), "missing ['alignment'"),
        (changed(offsets=[4, 15, 0]), "overlaps"),
        (changed(offsets=[4, 17.5, 0]), "offsets[1] is 17.5"),
        (changed(offsets=3), "must be lists"),
        (changed(strategy=3), "strategy a string"),
        (changed(num_shards="4"), "num_shards is '4'"),
    ],
)
def test_json_that_is_not_a_layout(text: str, part: str) -> None:
    with pytest.raises(ValueError) as caught:
        Layout.from_json(text)
    assert part in str(caught.value)
