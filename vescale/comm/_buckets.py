"""Which tensors share a collective: pure functions, so that all ranks and ``explain`` get the same buckets."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from vescale.errors import ArgumentError

# The cost of collectives by the ring algorithm: bytes that one rank sends, and seconds over a link.


@dataclass(frozen=True, slots=True)
class Link:
    """A coarse model of the link from one rank to the next: the cost of a step, and of a byte.

    It is used to choose between algorithms with the same result, so that only its order of magnitude matters.
    """

    latency_seconds: float
    bytes_per_second: float


GLOO_LINK = Link(50e-6, 1e9)
NCCL_LINK = Link(5e-6, 50e9)


def link_of(device_type: str) -> Link:
    return GLOO_LINK if device_type == "cpu" else NCCL_LINK


# Passes over the ring: in each, every rank sends (n - 1) pieces of 1/n of the tensor.
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


def ring_bytes(op: str, num_bytes: int, num_ranks: int) -> int:
    """The bytes that each of ``num_ranks`` sends for a tensor of ``num_bytes``, as the ledger counts."""
    return math.ceil(_PASSES[op] * (num_ranks - 1) / num_ranks * num_bytes)


def ring_seconds(op: str, num_bytes: int, num_ranks: int, link: Link) -> float:
    steps = _PASSES[op] * (num_ranks - 1)
    return steps * (link.latency_seconds + num_bytes / num_ranks / link.bytes_per_second)


def fused_bytes(num_bytes: int, axis_sizes: Sequence[int]) -> int:
    """The bytes of one all-reduce over the union of the axes: ``2 S (N - 1) / N``, N the product of their sizes."""
    return ring_bytes("all_reduce", num_bytes, math.prod(axis_sizes))


def per_axis_bytes(num_bytes: int, axis_sizes: Sequence[int]) -> int:
    """The bytes of an all-reduce for each axis: the sum of ``2 S (n - 1) / n``."""
    return sum(ring_bytes("all_reduce", num_bytes, size) for size in axis_sizes)


@dataclass(frozen=True, slots=True)
class ReductionCost:
    """One reduction of a buffer over a group.

    Attributes:
        scatters: whether it is a reduce-scatter along one axis and an all-reduce of the piece along the others, if any;
            otherwise it is one all-reduce of the whole.
        num_collectives: their number.
        num_bytes: the bytes that each rank sends, as the ledger counts.
        rest_bytes: of these, those of the all-reduce of the piece.
        seconds: by the ring model.
    """

    scatters: bool
    num_collectives: int
    num_bytes: int
    rest_bytes: int
    seconds: float


def reduction_cost(num_bytes: int, num_ranks: int, num_pieces: int, link: Link) -> ReductionCost:
    """The faster way to reduce ``num_bytes`` over ``num_ranks`` if each needs one of ``num_pieces``; 1: all of it."""
    whole = ReductionCost(
        False,
        1,
        ring_bytes("all_reduce", num_bytes, num_ranks),
        0,
        ring_seconds("all_reduce", num_bytes, num_ranks, link),
    )
    if num_pieces == 1:
        return whole
    rest, piece = num_ranks // num_pieces, num_bytes // num_pieces
    scattered = ReductionCost(
        True,
        1 + (rest > 1),
        (num_pieces - 1) * piece + ring_bytes("all_reduce", piece, rest),
        ring_bytes("all_reduce", piece, rest),
        ring_seconds("reduce_scatter", num_bytes, num_pieces, link) + ring_seconds("all_reduce", piece, rest, link),
    )
    return scattered if scattered.seconds <= whole.seconds else whole


DEFAULT_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is about this large, so that communication starts early in backward."""

BucketBytes = int | Sequence[int] | Literal["auto"]

# An automatic bucket spends at most this share of its time on latency.
_LATENCY_SHARE = 0.1
_DOUBLINGS = 4


def bucket_limits(bucket_bytes: BucketBytes, num_ranks: int, link: Link) -> tuple[int, ...]:
    """The size limits in bytes of the first, second, ... bucket of a kind, see :func:`plan_buckets`; the last one holds
    for all that follow.

    ``bucket_bytes`` is the limit of all buckets but the first, which is small; or the limits themselves; or ``"auto"``:
    each limit is twice the one before, from small buckets that start early to the size at which the link's latency no
    longer matters.

    Raises ValueError for values that are no positive size.
    """
    if bucket_bytes == "auto":
        step = num_ranks * link.latency_seconds * link.bytes_per_second
        largest = max(FIRST_BUCKET_BYTES, int(step / _LATENCY_SHARE))
        return tuple(max(1, largest >> (_DOUBLINGS - i)) for i in range(_DOUBLINGS + 1))
    if isinstance(bucket_bytes, str) or not isinstance(bucket_bytes, int | Sequence):
        raise ArgumentError(f"bucket_bytes={bucket_bytes!r}; pass a number of bytes, a list of such numbers, or 'auto'")
    limits = (min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes) if isinstance(bucket_bytes, int) else bucket_bytes
    if not limits or any(int(limit) < 1 for limit in limits):
        raise ArgumentError(f"bucket_bytes={bucket_bytes!r}; a bucket holds at least one byte")
    return tuple(int(limit) for limit in limits)


def plan_buckets(items: Sequence[tuple[Hashable, int]], limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Group ``(key, bytes)`` items, given in the order in which they become ready, into buckets of equal keys.

    A bucket takes items in order until the next one would exceed its limit. If it is less than half full, it takes that
    one, too, up to the last limit: a small first bucket then holds a large tensor instead of the bias before it. A larger
    item gets a bucket of its own. Returns the items' indices, with buckets in the order in which they are full.
    """
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    num_buckets: dict[Hashable, int] = {}
    buckets: list[tuple[int, ...]] = []
    for index, (key, num_bytes) in enumerate(items):
        count = num_buckets.get(key, 0)
        limit = limits[min(count, len(limits) - 1)]
        most = limit if 2 * filled.get(key, 0) >= limit else max(limit, limits[-1])
        if open_.get(key) and filled[key] + num_bytes > most:
            buckets.append(tuple(open_.pop(key)))
            num_buckets[key] = count + 1
            filled[key] = 0
        open_.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + num_bytes
    buckets += [tuple(indices) for indices in open_.values() if indices]
    return sorted(buckets, key=lambda indices: indices[-1])
