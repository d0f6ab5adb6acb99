"""``AxisMeetings``: which ranks of a mesh meet where a value is cut along some of its axes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["AxisMeetings"]


class AxisMeetings:
    """Channels of a :class:`vescale.comm.Board`: number 0 of all ranks, and one for each part of the axes, on which ranks
    meet that differ along these axes only.

    Args:
        coordinates: of each rank.
    """

    def __init__(self, coordinates: Sequence[tuple[int, ...]]) -> None:
        self._coordinates = coordinates
        ndim = len(coordinates[0])
        self._axes = [axis for axis in range(ndim) if len({each[axis] for each in coordinates}) > 1]
        parts = [part for size in range(1, len(self._axes)) for part in itertools.combinations(self._axes, size)]
        self._numbers = {part: number for number, part in enumerate(parts, 1)}

    @property
    def count(self) -> int:
        return 1 + len(self._numbers)

    def channel(self, axes: Sequence[int]) -> int:
        """Of a value that is cut along ``axes``, some of which are of more than one rank."""
        return self._numbers.get(tuple(axis for axis in self._axes if axis in axes), 0)

    def channels(self) -> list[list[tuple[int, ...]]]:
        """Of each channel, for each rank, the positions of those that it meets."""
        everyone = tuple(range(len(self._coordinates)))
        found: list[list[tuple[int, ...]]] = [[everyone] * len(everyone)]
        for part in self._numbers:
            keys = [tuple(x for axis, x in enumerate(each) if axis not in part) for each in self._coordinates]
            groups: dict[tuple[int, ...], list[int]] = {}
            for index, key in enumerate(keys):
                groups.setdefault(key, []).append(index)
            whole = {key: tuple(group) for key, group in groups.items()}
            found.append([whole[key] for key in keys])
        return found
