"""The cost of collectives by the ring algorithm: bytes that one rank sends, and seconds over a link."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "GLOO_LINK",
    "NCCL_LINK",
    "Link",
    "ReductionCost",
    "fused_bytes",
    "link_of",
    "per_axis_bytes",
    "reduction_cost",
    "ring_bytes",
    "ring_seconds",
]


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
