"""``Layout``: the positions of a group's tensors in one communication buffer."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from vescale.errors import ArgumentTypeError, DBufferError

# Arguments that must be integers.


def integers(name: str, values: Iterable[object], at_least: int = 0) -> tuple[int, ...]:
    """``values`` as Python integers (numpy's and torch's are accepted, bool and float are not).

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is below ``at_least``.
    """
    found = []
    try:
        items = list(values)
    except TypeError:
        raise ArgumentTypeError(
            f"{name} is {values!r}; expected a sequence of integers. Pass a list or a tuple."
        ) from None
    for i, value in enumerate(items):
        where = name if len(items) == 1 else f"{name}[{i}]"
        try:
            if isinstance(value, bool):
                raise TypeError
            number = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            raise ArgumentTypeError(
                f"{where} is {value!r} of type {type(value).__name__}; expected an integer number of elements. "
                "Convert it with int() where it is computed."
            ) from None
        if number < at_least:
            raise DBufferError(f"{where} is {number}; expected at least {at_least}. Fix the value that is passed.")
        found.append(number)
    return tuple(found)


_FORMAT = "vescale.layout"
_VERSION = 1


class ShardSlice(NamedTuple):
    """Elements [begin, end) of the flattened ``tensor`` are at ``local_offset`` of the rank's shard."""

    tensor: int
    begin: int
    end: int
    local_offset: int


class LocalUnits(NamedTuple):
    """How many blocks of one tensor each rank holds, as runs of ranks with the same number.

    ``runs`` are (number of ranks, units of each of them) in rank order and cover all ranks. One unit is one block of
    ``block`` consecutive elements of the flattened tensor; the tensor's last block may be shorter, and then the last
    rank that holds units holds fewer than ``units * block`` elements. Units of all ranks sum to
    ``ceil(numel / block)``; a rank's units are consecutive, and ranks hold them in rank order.
    """

    numel: int
    block: int
    runs: tuple[tuple[int, int], ...]

    def expand(self) -> tuple[int, ...]:
        """Units of every rank. Memory: O(num_shards)."""
        return tuple(units for ranks, units in self.runs for _ in range(ranks))


@dataclass(frozen=True)
class Layout:
    """Tensors in one buffer of ``num_shards`` equal shards; rank r owns elements [r, r + 1) * ``shard_size``.

    Sizes and offsets are in elements; tensor i is the caller's tensor i, flattened, at
    [``offsets[i]``, ``offsets[i] + numels[i]``) of the buffer, and is divided only between its blocks of ``blocks[i]``
    elements. Validated when constructed, in O(n) beside one sort:

    * tensors are within the buffer and do not overlap (empty tensors may be anywhere in it);
    * every shard boundary inside a tensor falls between two of its blocks;
    * ``shard_size`` is a multiple of ``alignment`` and of ``tensor_alignment``, offsets are of ``tensor_alignment``;
    * ``lower_bound <= shard_size``.

    ``lower_bound`` is proven: no layout of these tensors in one buffer has a smaller shard. ``strategy`` names what
    found the layout; it and the bound do not take part in :attr:`digest`.

    Raises:
        ValueError: a condition above does not hold; the message names the tensor, its offset, size and block.
        TypeError: a field is not an integer or a sequence of integers.
    """

    numels: tuple[int, ...]
    blocks: tuple[int, ...]
    num_shards: int
    alignment: int
    shard_size: int
    offsets: tuple[int, ...]
    lower_bound: int
    strategy: str
    tensor_alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("numels", "blocks", "offsets"):
            object.__setattr__(self, name, integers(name, getattr(self, name), at_least=name == "blocks"))
        for name, least in (("num_shards", 1), ("alignment", 1), ("tensor_alignment", 1), ("shard_size", 0)):
            object.__setattr__(self, name, integers(name, [getattr(self, name)], at_least=least)[0])
        object.__setattr__(self, "lower_bound", integers("lower_bound", [self.lower_bound])[0])
        if not len(self.numels) == len(self.blocks) == len(self.offsets):
            raise DBufferError(
                f"Layout got {len(self.numels)} numels, {len(self.blocks)} blocks and {len(self.offsets)} offsets; "
                "each tensor needs one of each. Pass sequences of the same length."
            )
        if self.lower_bound > self.shard_size:
            raise DBufferError(
                f"lower_bound {self.lower_bound} is larger than shard_size {self.shard_size}; a proven bound is never "
                "larger. Pass the bound of the same tensors, num_shards and alignment."
            )
        unit = math.lcm(self.alignment, self.tensor_alignment)
        if self.shard_size % unit:
            raise DBufferError(
                f"shard_size {self.shard_size} is not a multiple of alignment {self.alignment} and tensor_alignment "
                f"{self.tensor_alignment}. Round it up to {-(-self.shard_size // unit) * unit} and plan again."
            )
        self._check_tensors()

    def _check_tensors(self) -> None:
        size, shard = self.buffer_size, self.shard_size
        end, previous = 0, -1
        for i in self._by_offset:
            offset, numel, block = self.offsets[i], self.numels[i], self.blocks[i]
            what = f"tensor {i} ({numel} elements in blocks of {block}) at offset {offset}"
            if offset + numel > size:
                raise DBufferError(
                    f"{what} ends past the buffer of {size} elements ({self.num_shards} shards of {shard}). Let "
                    "plan_layout choose shard_size and offsets."
                )
            if offset % self.tensor_alignment:
                raise DBufferError(
                    f"{what} does not start at a multiple of tensor_alignment {self.tensor_alignment}. "
                    "Let plan_layout choose the offsets."
                )
            if offset < end:
                raise DBufferError(
                    f"{what} overlaps tensor {previous}, which ends at {end}. Let plan_layout choose the offsets."
                )
            head = -offset % shard or shard  # elements before the first boundary behind the start
            if numel > head and (head % block or (numel > head + shard and shard % block)):
                boundary = offset + head + (0 if head % block else shard)
                raise DBufferError(
                    f"{what} is divided by the shard boundary at {boundary}, inside one of its blocks. Only a "
                    "boundary at a multiple of block from the tensor's start is legal. Let plan_layout choose the "
                    "offsets."
                )
            end, previous = offset + numel, i
        for i, numel in enumerate(self.numels):
            if numel == 0 and (self.offsets[i] > size or self.offsets[i] % self.tensor_alignment):
                raise DBufferError(
                    f"tensor {i} (empty) has offset {self.offsets[i]}; it must be a multiple of tensor_alignment "
                    f"{self.tensor_alignment} of at most {size}. Use offset 0."
                )

    @cached_property
    def _by_offset(self) -> tuple[int, ...]:
        """Tensors that have elements, in buffer order."""
        return tuple(sorted((i for i, n in enumerate(self.numels) if n), key=self.offsets.__getitem__))

    @cached_property
    def _sorted_offsets(self) -> tuple[int, ...]:
        return tuple(self.offsets[i] for i in self._by_offset)

    # Sizes ------------------------------------------------------------------------------------------------------------

    @property
    def buffer_size(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_size

    @cached_property
    def num_elements(self) -> int:
        """Elements of all tensors."""
        return sum(self.numels)

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.buffer_size - self.num_elements

    @property
    def padding_ratio(self) -> float:
        """Padding by the size of the tensors; 0 when there are no elements."""
        return self.padding / self.num_elements if self.num_elements else 0.0

    @property
    def optimal(self) -> bool:
        """Proven: no layout of these tensors in one buffer is smaller (``lower_bound`` is reached)."""
        return self.shard_size == self.lower_bound

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that are equal for equal placements: tensors, blocks, shards and offsets.

        Ranks that have planned independently compare it before they communicate.
        """
        geometry = (
            self.numels,
            self.blocks,
            self.num_shards,
            self.alignment,
            self.tensor_alignment,
            self.shard_size,
            self.offsets,
        )
        return hashlib.sha256(json.dumps(geometry, separators=(",", ":")).encode()).hexdigest()[:16]

    # Ranks and tensors ------------------------------------------------------------------------------------------------

    def shard_slices(self, rank: int) -> list[ShardSlice]:
        """The parts of tensors in the shard of ``rank``, in buffer order. Time: O(log n + slices).

        Raises:
            IndexError: ``rank`` is not in [0, num_shards).
        """
        if not 0 <= rank < self.num_shards:
            raise IndexError(f"rank {rank} of a layout of {self.num_shards} shards. Pass 0 to {self.num_shards - 1}.")
        low, high = rank * self.shard_size, (rank + 1) * self.shard_size
        slices = []
        first = max(0, bisect_right(self._sorted_offsets, low) - 1)
        for i in self._by_offset[first : bisect_right(self._sorted_offsets, high - 1)]:
            offset = self.offsets[i]
            begin, end = max(0, low - offset), min(self.numels[i], high - offset)
            if begin < end:
                slices.append(ShardSlice(i, begin, end, offset + begin - low))
        return slices

    def tensor_ranks(self, tensor: int) -> range:
        """The ranks that hold elements of ``tensor``; an empty range for an empty tensor."""
        self._check_index(tensor)
        offset, numel = self.offsets[tensor], self.numels[tensor]
        if numel == 0:
            return range(0)
        return range(offset // self.shard_size, (offset + numel - 1) // self.shard_size + 1)

    def local_units(self, tensor: int) -> LocalUnits:
        """The shards of ``tensor`` in the form that a ragged placement takes: units of ``block`` elements for each
        rank.

        At most five runs, whatever ``num_shards``: ranks before it, its first rank, full shards, its last rank, ranks
        behind it.
        """
        ranks = self.tensor_ranks(tensor)
        offset, numel, block = self.offsets[tensor], self.numels[tensor], self.blocks[tensor]
        if not ranks:
            return LocalUnits(numel, block, ((self.num_shards, 0),))
        total = -(-numel // block)
        if len(ranks) == 1:
            pieces = [(1, total)]
        else:
            first = (ranks[1] * self.shard_size - offset) // block
            full = self.shard_size // block if len(ranks) > 2 else 0
            between = len(ranks) - 2
            pieces = [(1, first), (between, full), (1, total - first - between * full)]
        runs: list[tuple[int, int]] = []
        for count, units in [(ranks.start, 0), *pieces, (self.num_shards - ranks.stop, 0)]:
            if count and runs and runs[-1][1] == units:
                runs[-1] = (runs[-1][0] + count, units)
            elif count:
                runs.append((count, units))
        return LocalUnits(numel, block, tuple(runs))

    def _check_index(self, tensor: int) -> None:
        if not 0 <= tensor < len(self.numels):
            raise IndexError(
                f"tensor {tensor} of a layout of {len(self.numels)} tensors. Pass an index in the order that "
                "plan_layout was given."
            )

    # JSON -------------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """Return a JSON object, from which :meth:`from_json` returns an equal layout."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "num_shards": self.num_shards,
                "alignment": self.alignment,
                "tensor_alignment": self.tensor_alignment,
                "shard_size": self.shard_size,
                "lower_bound": self.lower_bound,
                "strategy": self.strategy,
                "numels": self.numels,
                "blocks": self.blocks,
                "offsets": self.offsets,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read :meth:`to_json`'s text, and validate it like any layout.

        Args:
            text: what :meth:`to_json` returned.

        Raises:
            ValueError: not JSON, not a layout, another version, or a layout that is not valid.
        """
        try:
            data: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise DBufferError(
                f"not JSON ({error}); expected the text that Layout.to_json returns. Write it again."
            ) from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise DBufferError(
                f"the JSON is not a layout: expected an object with format {_FORMAT!r}. Pass Layout.to_json's text."
            )
        if data.pop("version", None) != _VERSION:
            raise DBufferError(f"expected version {_VERSION} of {_FORMAT}. Plan again and write it with this release.")
        del data["format"]
        expected = set(cls.__dataclass_fields__)
        if set(data) != expected:
            raise DBufferError(
                f"the layout's fields differ: missing {sorted(expected - set(data))}, unknown "
                f"{sorted(set(data) - expected)}. Pass the text of Layout.to_json unchanged."
            )
        if not isinstance(data["strategy"], str) or not all(
            isinstance(data[name], list) for name in ("numels", "blocks", "offsets")
        ):
            raise DBufferError(
                "numels, blocks and offsets must be lists and strategy a string. Pass the text of Layout.to_json."
            )
        try:
            return cls(**data)
        except TypeError as error:
            raise DBufferError(f"{error} Pass the text of Layout.to_json unchanged.") from error


# Offsets of tensors in a fixed order, each as early as possible. The only state is the position where the last tensor
# ends. A shard boundary may cut a tensor only between two of its blocks. For the next tensor, with ``room`` elements
# before the next boundary: * it fits in the room, or its first blocks (its ``head``) fill the end of the room and the
# rest follows; * a tensor that contains a whole shard needs ``shard % block == 0``, and then every boundary is legal; *
# otherwise it crosses one boundary only, so that ``numel - head <= shard``, and the longest head is the best one. The
# earliest legal start is monotone in the position. Therefore placing each tensor as early as possible is optimal for an
# order, and costs O(1) a tensor for any number of shards.


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def earliest_start(end: int, numel: int, block: int, shard: int) -> int | None:
    """The smallest legal offset at or after ``end``; None when the tensor fits nowhere with this shard size."""
    room = shard - end % shard
    if numel <= room:
        return end
    head = room - room % block
    if numel - head <= shard or shard % block == 0:
        return end + room - head
    head = shard - shard % block
    return end + room + shard - head if numel - head <= shard else None


def last_end(numels: Sequence[int], blocks: Sequence[int], order: Iterable[int], shard: int, limit: int) -> int | None:
    """Where the last tensor of ``order`` ends; None when one fits nowhere or the end passes ``limit``."""
    end = 0
    for i in order:  # the body of earliest_start, inline: the planner's time in pure Python is spent here
        numel = numels[i]
        room = shard - end % shard
        if numel > room:
            block = blocks[i]
            head = room - room % block
            if numel - head <= shard or shard % block == 0:
                end += room - head
            else:
                head = shard - shard % block
                if numel - head > shard:
                    return None
                end += room + shard - head
        end += numel
        if end > limit:
            return None
    return end


def offsets_in_order(numels: Sequence[int], blocks: Sequence[int], order: Iterable[int], shard: int) -> list[int]:
    """Offsets, in the caller's tensor order, of tensors placed as early as possible in ``order`` (which must fit)."""
    offsets = [0] * len(numels)
    end = 0
    for i in order:
        start = earliest_start(end, numels[i], blocks[i], shard)
        assert start is not None, "offsets are computed only for an order that is known to fit"
        offsets[i] = start
        end = start + numels[i]
    return offsets
