"""Sharding over several axes at once, for parameters of units that are sharded over these axes at rest and whole on each
while they run.

A ragged shard comes last, so that a DTensor can have one only. The same ragged placement on several axes at rest
therefore means one shard over all their ranks together, in the order of the mesh; the parameter is then on a mesh in
which one axis, behind the others, takes their place (:func:`vescale.comm.join_axes`). The same ``Shard(dim)`` on several
axes also is one ``Shard(dim)`` over all their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.placements import RaggedShard

__all__ = ["gathered_positions", "join_placements", "ragged_positions"]


def gathered_positions(rest: Sequence[Placement], run: Sequence[Placement]) -> tuple[int, ...]:
    """The axes over which a parameter is cut at rest, in one cut, and whole while it runs; () where there are none, where
    cuts differ, or where something else changes."""
    found = tuple(position for position, (one, other) in enumerate(zip(rest, run)) if one != other)
    cuts = {rest[position] for position in found}
    if len(cuts) != 1 or not all(isinstance(run[position], Replicate) for position in found):
        return ()
    cut = rest[found[0]]
    if isinstance(cut, RaggedShard):
        return found if found == ragged_positions(rest) else ()
    return found if type(cut) is Shard else ()


def ragged_positions(placements: Sequence[Placement | None]) -> tuple[int, ...]:
    """The axes with a ragged cut."""
    return tuple(position for position, placement in enumerate(placements) if isinstance(placement, RaggedShard))


def join_placements(
    placements: Sequence[Placement], sizes: Sequence[int], positions: Sequence[int]
) -> tuple[tuple[Placement, ...], tuple[int, ...]]:
    """Placements, and sizes of axes, with those at ``positions`` as one behind the others; as they are where that is one."""
    if len(positions) <= 1:
        return tuple(placements), tuple(sizes)
    others = [position for position in range(len(sizes)) if position not in positions]
    joint = math.prod(sizes[position] for position in positions)
    return (
        (*(placements[position] for position in others), placements[positions[0]]),
        (*(sizes[position] for position in others), joint),
    )
