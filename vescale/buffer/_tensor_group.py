"""``TensorGroup``: the tensors of one buffer and their positions in it. A value that holds no memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from vescale.buffer._layout import Layout, ShardSlice, integers
from vescale.buffer._planner import Effort, plan_layout
from vescale.errors import DBufferError, UnknownTensorError
from vescale.placements import RaggedShard, StridedRaggedShard

COLLECTIVE_ALIGNMENT_BYTES = 16
"""What NCCL's fast protocols and vectorized kernels want of every address and size."""

# The bound that every host can afford, with or without the C++ helper, so that all ranks plan the same layout.
_EFFORT = 1_000_000


def alignment_in_elements(dtypes: Iterable[torch.dtype], alignment_bytes: int = COLLECTIVE_ALIGNMENT_BYTES) -> int:
    """The smallest number of elements that is a multiple of ``alignment_bytes`` in each of the dtypes."""
    (alignment_bytes,) = integers("alignment_bytes", [alignment_bytes], at_least=1)
    return math.lcm(*(alignment_bytes // math.gcd(alignment_bytes, dtype.itemsize) for dtype in dtypes))


@dataclass(frozen=True)
class TensorGroup:
    """Tensors with names and shapes, at the offsets of a :class:`Layout`.

    The shapes are what a rank computes with: for a tensor that another mesh axis shards, its local shape. One group
    describes every buffer of the same tensors (values, gradients, another dtype), so they have equal offsets.

    Args:
        names, shapes: of the tensors, in the order of ``layout``.
        layout: where each tensor is in the buffer, from :func:`~vescale.plan_layout`.

    Raises:
        ValueError: names that are not unique, or a layout of other sizes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "shapes", tuple(tuple(int(n) for n in shape) for shape in self.shapes))
        if len(set(self.names)) != len(self.names):
            twice = sorted({name for name in self.names if self.names.count(name) > 1})
            raise DBufferError(
                f"two tensors of a group are named {twice[0]!r}; tensors are looked up by name: rename one"
            )
        numels = tuple(math.prod(shape) for shape in self.shapes)
        if len(self.names) != len(self.shapes) or numels != self.layout.numels:
            raise DBufferError(
                f"{len(self.names)} names, tensors of {numels} elements, and a layout of {self.layout.numels}; plan the "
                "layout of these shapes (TensorGroup.plan does)"
            )

    @classmethod
    def plan(
        cls,
        shapes: Mapping[str, Sequence[int]],
        num_shards: int,
        *,
        dtypes: Iterable[torch.dtype] = (torch.float32,),
        blocks: Mapping[str, int] | None = None,
        alignment_bytes: int = COLLECTIVE_ALIGNMENT_BYTES,
        effort: Effort = _EFFORT,
    ) -> TensorGroup:
        """Plan a group for ``num_shards`` ranks with the smallest padding; no communication, the same on every rank.

        Args:
            shapes: by name, in any order that is the same on every rank.
            num_shards: the finest division: the product of the sizes of all mesh axes that may ever shard the buffer.
            dtypes: every dtype that a buffer of this group will have.
            blocks: elements that must stay on one rank, by name; 1 (anywhere) for names that are missing.
            alignment_bytes: shards and tensors start at multiples of this many bytes.
            effort: see :func:`plan_layout`; the default computes the same layout on hosts with and without the helper.
        """
        alignment = alignment_in_elements(dtypes, alignment_bytes)
        chosen = blocks or {}
        layout = plan_layout(
            [math.prod(shape) for shape in shapes.values()],
            [chosen.get(name, 1) for name in shapes],
            num_shards,
            alignment,
            tensor_alignment=alignment,
            effort=effort,
        )
        return cls(tuple(shapes), tuple(tuple(shape) for shape in shapes.values()), layout)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.names)}

    def index(self, name: str) -> int:
        """Raises KeyError for a name that is not in the group."""
        if name not in self._index:
            raise UnknownTensorError(f"no tensor {name!r} in this group of {len(self)}: {', '.join(self.names[:8])}")
        return self._index[name]

    @cached_property
    def _in_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tensors with elements in buffer order, and their offsets."""
        order = tuple(sorted((i for i, n in enumerate(self.layout.numels) if n), key=lambda i: self.layout.offsets[i]))
        return order, tuple(self.layout.offsets[i] for i in order)

    def slices(self, begin: int, end: int) -> list[ShardSlice]:
        """The parts of tensors in elements [begin, end) of the buffer, in buffer order."""
        order, offsets = self._in_order
        found = []
        for i in order[max(0, bisect_right(offsets, begin) - 1) : bisect_right(offsets, end - 1)]:
            offset, numel = self.layout.offsets[i], self.layout.numels[i]
            low, high = max(0, begin - offset), min(numel, end - offset)
            if low < high:
                found.append(ShardSlice(i, low, high, offset + low - begin))
        return found

    def gaps(self, begin: int, end: int) -> list[tuple[int, int]]:
        """The padding in elements [begin, end) of the buffer, as (begin, end) counted from ``begin``."""
        found, at = [], 0
        for part in self.slices(begin, end):
            if part.local_offset > at:
                found.append((at, part.local_offset))
            at = part.local_offset + part.end - part.begin
        if at < end - begin:
            found.append((at, end - begin))
        return found

    def placement(self, tensor: int, num_pieces: int, split_factor: int = 1) -> RaggedShard:
        """The ragged placement of ``tensor`` on an axis whose ``num_pieces`` ranks hold equal pieces of the buffer.

        ``split_factor``: the number of pieces into which ``Shard(0)`` on later mesh axes has already divided dim 0.
        """
        units = self._units(tensor, num_pieces)
        block = self.layout.blocks[tensor]
        if split_factor > 1:
            return StridedRaggedShard((0,), units, block, split_factor=split_factor)
        return RaggedShard((0,), units, block)

    def _units(self, tensor: int, num_pieces: int) -> tuple[int, ...]:
        fine = self.layout.local_units(tensor).expand()
        if num_pieces == self.layout.num_shards:
            return fine
        step = self.layout.num_shards // num_pieces
        ends = (0, *accumulate(fine))
        return tuple(ends[(piece + 1) * step] - ends[piece * step] for piece in range(num_pieces))
