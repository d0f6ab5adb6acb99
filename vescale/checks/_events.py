"""What ranks compare at one event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LocalPart", "Rows", "Site", "part_keys"]

Rows = Sequence[tuple[str, str]]


class Site(NamedTuple):
    """What is about to be done, and the number of the model if it is one model's."""

    text: str
    model: int = 0


class LocalPart:
    """An input of which each rank gives its part.

    Attributes:
        name: of the input; shape: of this rank's part; text: what its replicas must have, too.
        axes: of the mesh, along which ranks have different parts.
    """

    __slots__ = ("axes", "name", "shape", "text")

    def __init__(self, name: str, shape: Sequence[int], text: str, axes: Sequence[int]) -> None:
        self.name, self.shape, self.text, self.axes = name, tuple(shape), text, tuple(axes)


def part_keys(parts: Sequence[LocalPart], coordinates: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Of each rank, which part it has."""
    axes = sorted({axis for part in parts for axis in part.axes})
    return [tuple(coordinate[axis] for axis in axes) for coordinate in coordinates]
