"""The planning problem in its normal form.

``tensor_alignment`` is divided out: if tensors start at multiples of A, and the shard size is a multiple, too, then
rounding each size up to A and each block to ``lcm(block, A)``, and counting in units of A, loses nothing. Empty tensors
are dropped. A block larger than its tensor is reduced to the tensor's size, which has the same meaning (never cut) and
makes more tensors equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Kind:
    """Interchangeable tensors: the caller's indices of equal (numel, block)."""

    numel: int
    block: int
    tensors: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.tensors)

    @property
    def fluid(self) -> bool:
        """May be cut anywhere."""
        return self.block == 1


@dataclass(frozen=True)
class Problem:
    """Sizes in units of ``unit`` elements; ``source[i]`` is the caller's index of tensor i."""

    numels: tuple[int, ...]
    blocks: tuple[int, ...]
    num_shards: int
    alignment: int
    unit: int
    source: tuple[int, ...]

    @classmethod
    def normal(
        cls, numels: Sequence[int], blocks: Sequence[int], num_shards: int, alignment: int, tensor_alignment: int
    ) -> Problem:
        source = tuple(i for i, numel in enumerate(numels) if numel > 0)
        sizes = tuple(-(-numels[i] // tensor_alignment) for i in source)
        return cls(
            numels=sizes,
            blocks=tuple(
                min(size, math.lcm(blocks[i], tensor_alignment) // tensor_alignment)
                for i, size in zip(source, sizes, strict=True)
            ),
            num_shards=num_shards,
            alignment=math.lcm(alignment, tensor_alignment) // tensor_alignment,
            unit=tensor_alignment,
            source=source,
        )

    @cached_property
    def total(self) -> int:
        return sum(self.numels)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """In order of first appearance."""
        found: dict[tuple[int, int], list[int]] = {}
        for i, kind in enumerate(zip(self.numels, self.blocks, strict=True)):
            found.setdefault(kind, []).append(i)
        return tuple(Kind(numel, block, tuple(tensors)) for (numel, block), tensors in found.items())
