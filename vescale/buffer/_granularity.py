"""Sharding granularity: the blocks of each parameter that must stay on one rank.

A quantizer or a matrix optimizer works on rows or tiles of a weight. The planner has one number for each tensor, the size
of the blocks of consecutive elements that are never cut. Here rows and tiles are converted to that number; if there is
none with the same meaning, an error is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import regex

from vescale.buffer._layout import integers
from vescale.errors import DBufferError

FFN_WEIGHTS = (
    r"(?:.*\.)?(?:gate_proj|up_proj|down_proj|gate_up_proj|w1|w2|w3|fc1|fc2|wi(?:_\d)?|wo)(?:\.weight)?"
    r"|.*\.mlp\.(?:c_fc|c_proj|dense_h_to_4h|dense_4h_to_h)\.weight"
)
"""Matrices of feed-forward blocks and experts in Hugging Face models: what DeepSeek-style quantization works on."""


class Granularity(Protocol):
    def block(self, shape: Sequence[int]) -> int: ...


@dataclass(frozen=True)
class Elements:
    """Blocks of ``count`` consecutive elements of the flattened tensor; 1 allows shard boundaries anywhere."""

    count: int = 1

    def __post_init__(self) -> None:
        integers("Elements.count", [self.count], at_least=1)

    def block(self, shape: Sequence[int]) -> int:
        """Elements of one block of a tensor of this shape.

        Args:
            shape: of the tensor.
        """
        return self.count


@dataclass(frozen=True)
class Rows:
    """Blocks of ``count`` whole rows (of the last dim) of each matrix.

    A tensor of more than two dims is a stack of matrices (experts) whose blocks restart in each matrix, so ``count``
    must divide the rows of one. ``across_matrices=True`` counts rows through the whole stack instead, as the
    veScale-FSDP paper's figures do; then a block may hold the end of one expert and the start of the next. A lone
    matrix may end with a short block. A vector is one row.
    """

    count: int
    across_matrices: bool = False

    def __post_init__(self) -> None:
        integers("Rows.count", [self.count], at_least=1)

    def block(self, shape: Sequence[int]) -> int:
        """Elements of one block of a tensor of this shape.

        Args:
            shape: of the tensor.

        Raises:
            ValueError: the rows of a matrix in a stack are not a multiple of ``count``.
        """
        if len(shape) < 2:
            return max(1, math.prod(shape))
        if self.across_matrices:
            return max(1, self.count * shape[-1])
        return Tile((self.count, shape[-1])).block(shape)


@dataclass(frozen=True)
class Tile:
    """Tiles of the last ``len(dims)`` dims, e.g. ``Tile((128, 128))`` of every matrix.

    Memory is row-major, so that the smallest run of elements that divides no tile is a band: the tile's size along its
    first dim longer than 1, times the sizes of all later dims. A 128 x 128 tile becomes 128 whole rows.
    """

    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", integers("Tile.dims", self.dims, at_least=1))
        if not self.dims:
            raise DBufferError("Tile.dims is empty; expected the size of at least one dim. Use Elements() instead.")

    def block(self, shape: Sequence[int]) -> int:
        """Elements of one band of tiles of a tensor of this shape.

        Args:
            shape: of the tensor.

        Raises:
            ValueError: the tensor has fewer dims than the tile, or a band would run into the next matrix.
        """
        if len(shape) < len(self.dims):
            raise DBufferError(
                f"a tensor of shape {tuple(shape)} has no tiles of {len(self.dims)} dims {self.dims}. "
                "Give it Elements() or a tile of at most its own dims."
            )
        leading = len(shape) - len(self.dims)
        dim, size = next(((leading + i, size) for i, size in enumerate(self.dims) if size > 1), (len(shape) - 1, 1))
        if size >= shape[dim]:  # one band holds the whole dim
            size = shape[dim]
        elif shape[dim] % size and math.prod(shape[:dim]) > 1:
            raise DBufferError(
                f"{size} does not divide the {shape[dim]} of dim {dim} in a tensor of shape {tuple(shape)}: blocks of "
                f"{size} would extend from one matrix into the next. Nearest sizes that work: "
                f"{_nearest_divisors(shape[dim], size)}."
            )
        return max(1, size * math.prod(shape[dim + 1 :]))


def _nearest_divisors(number: int, wanted: int) -> str:
    """The divisors of ``number`` on both sides of ``wanted``."""
    divisors = sorted({d for i in range(1, math.isqrt(number) + 1) if number % i == 0 for d in (i, number // i)})
    below = max(d for d in divisors if d <= wanted)
    above = min(d for d in divisors if d >= wanted)
    return f"{below} or {above}"


class _Parameter(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...


class GranularityTable:
    """An ``orig_param_policy``: (name, parameter) -> block in elements, by the first pattern that matches.

    ``entries`` are (pattern, granularity) pairs; patterns are matched against the whole parameter name with the
    ``regex`` package. A parameter that no pattern matches gets None: it may be divided anywhere.

        policy = GranularityTable([(r".*\\.experts\\..*", Tile((128, 128))), (r".*norm.*", Elements())])
        fully_shard(layer, orig_param_policy=policy)

    Raises:
        ValueError: a pattern is not a regular expression.
    """

    def __init__(self, entries: Iterable[tuple[str, Granularity]]) -> None:
        self._entries = []
        for pattern, granularity in entries:
            try:
                self._entries.append((regex.compile(pattern), granularity))
            except regex.error as error:
                raise DBufferError(
                    f"pattern {pattern!r} is not a regular expression: {error}. Escape literal characters with \\."
                ) from error

    def __call__(self, name: str, parameter: _Parameter) -> int | None:
        """The block of one parameter in elements, or None.

        Raises:
            ValueError: the granularity does not suit the parameter's shape; the message names both.
        """
        for pattern, granularity in self._entries:
            if pattern.fullmatch(name):
                try:
                    return granularity.block(tuple(parameter.shape))
                except ValueError as error:
                    raise DBufferError(f"parameter {name!r}, {granularity}: {error}") from error
        return None

    def blocks(self, shapes: Mapping[str, Sequence[int]]) -> list[int]:
        """The block of every parameter in elements, 1 where no pattern matches: the ``blocks`` of ``plan_layout``.

        Args:
            shapes: of all parameters, by name.

        Raises:
            ValueError: a granularity does not suit a shape, or a pattern matches no parameter at all.
        """
        unused = [p.pattern for p, _ in self._entries if not any(p.fullmatch(name) for name in shapes)]
        if unused:
            raise DBufferError(
                f"pattern {unused[0]!r} matches none of {len(shapes)} parameters, for example "
                f"{', '.join(list(shapes)[:3])}. Patterns are matched against whole names; correct or remove it."
            )
        return [self(name, _Shaped(tuple(shape))) or 1 for name, shape in shapes.items()]


@dataclass(frozen=True)
class _Shaped:
    shape: tuple[int, ...]
