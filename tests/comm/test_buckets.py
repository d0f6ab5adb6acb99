"""Bucket planning and the ring model: pure, against brute force and known figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale.comm import (
    FIRST_BUCKET_BYTES,
    Link,
    bucket_limits,
    fused_bytes,
    per_axis_bytes,
    plan_buckets,
    reduction_cost,
    ring_bytes,
)

LINK = Link(1e-5, 1e9)


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=40),
    st.lists(st.integers(1, 100), min_size=1, max_size=3),
)
def test_buckets(items: list[tuple[str, int]], limits: list[int]) -> None:
    buckets = plan_buckets(items, limits)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(items)))
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)  # as they get full
    for key in "ab":
        own = [bucket for bucket in buckets if items[bucket[0]][0] == key]
        for number, bucket in enumerate(own):
            assert {items[index][0] for index in bucket} == {key} and list(bucket) == sorted(bucket)
            limit = limits[min(number, len(limits) - 1)]
            size = sum(items[index][1] for index in bucket)
            assert size <= max(limit, limits[-1]) or len(bucket) == 1
            assert size <= limit or 2 * (size - items[bucket[-1]][1]) < limit  # it was not half full before the last
            if number + 1 < len(own):  # closed because the next did not fit
                most = limit if 2 * size >= limit else max(limit, limits[-1])
                assert size + items[own[number + 1][0]][1] > most


def test_a_small_first_bucket_holds_a_large_tensor() -> None:
    bias, weight = 2048, 2**20
    assert plan_buckets([("a", n) for n in (bias, weight) * 4], (2**20, 25 * 2**20)) == [(0, 1), (2, 3, 4, 5, 6, 7)]


def test_limits() -> None:
    assert bucket_limits(25 * 2**20, 8, LINK) == (FIRST_BUCKET_BYTES, 25 * 2**20)
    assert bucket_limits(1000, 8, LINK) == (1000, 1000)
    assert bucket_limits([1, 2, 3], 8, LINK) == (1, 2, 3)
    growing = bucket_limits("auto", 64, LINK)
    assert list(growing) == sorted(growing) and growing[-1] // growing[0] == 16
    assert bucket_limits("auto", 512, LINK)[-1] > growing[-1]  # latency grows with the ring
    for wrong in (0, -5, [], [4, 0], "big"):
        with pytest.raises(ValueError, match="bucket_bytes"):
            bucket_limits(wrong, 8, LINK)  # type: ignore[arg-type]


def test_ring_model() -> None:
    assert fused_bytes(1200, (2, 2, 3)) == 2 * 1200 * 11 // 12
    assert per_axis_bytes(1200, (2, 2, 3)) == 1200 + 1200 + 1600
    assert ring_bytes("reduce_scatter", 800, 8) == 700
    hybrid = reduction_cost(8_000_000, 8, 4, LINK)
    assert hybrid.scatters and hybrid.num_collectives == 2
    assert hybrid.num_bytes == 6_000_000 + 2_000_000 and hybrid.rest_bytes == 2_000_000
    assert reduction_cost(8_000_000, 4, 4, LINK).num_collectives == 1
    whole = reduction_cost(8_000_000, 8, 1, LINK)
    assert not whole.scatters and whole.num_bytes == 14_000_000 and whole.seconds > hybrid.seconds
