"""What a gradient that is a DTensor contributes to the sum over the ranks of a group."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec

__all__ = ["Summands", "summands"]


@dataclass(frozen=True)
class Summands:
    """The way of a gradient from its arrival to a sum.

    Attributes:
        target: placements that it is brought to before.
        divisor: of an average, to make a summand of it.
        whole: data-parallel axes along which every rank has all of it.
        pending: other axes along which it stays a sum, to be reduced later.
    """

    target: tuple[Placement, ...]
    divisor: int
    whole: frozenset[int]
    pending: frozenset[int]


def summands(
    arrival: tuple[Placement, ...], parameter: DTensorSpec, data_parallel: Sequence[int], leaves_pending: bool
) -> Summands:
    """Of a gradient placed as ``arrival``; ``leaves_pending``: sums may stay where the parameter is replicated."""
    return _summands(
        arrival, tuple(parameter.placements), tuple(parameter.mesh.shape), tuple(data_parallel), leaves_pending
    )


@functools.lru_cache(maxsize=4096)
def _summands(
    arrival: tuple[Placement, ...],
    parameter: tuple[Placement, ...],
    sizes: tuple[int, ...],
    data_parallel: tuple[int, ...],
    leaves_pending: bool,
) -> Summands:
    target: list[Placement] = []
    whole, pending, divisors = set(), set(), []
    for axis, (found, wanted) in enumerate(zip(arrival, parameter)):
        adds = type(found) is Partial and found.reduce_op in ("sum", "avg")
        if axis in data_parallel:
            target.append(found if adds else Replicate())
            if not adds:
                whole.add(axis)
        elif adds and leaves_pending and isinstance(wanted, Replicate):
            target.append(found)
            pending.add(axis)
        else:
            target.append(wanted)
            continue
        if adds and found.is_partial("avg"):
            divisors.append(sizes[axis])
    return Summands(tuple(target), math.prod(divisors), frozenset(whole), frozenset(pending))
