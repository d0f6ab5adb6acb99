"""What the ops of a step compute and move: floating-point operations and bytes of memory, by module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from vescale.estimation._memory_log import Instant
from vescale.estimation._tensors_in import tensors_in

__all__ = ["OpCost", "OpCosts"]


# Memory is reserved, or given to a tensor: nothing is read or written.
_MOVES_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")


@dataclass
class OpCost:
    """Ops of one kind, dtype and size.

    Attributes:
        flops: floating-point operations of one call; 0 for ops that only move data.
        num_bytes: read and written by one call.
        num_calls: how often.
    """

    flops: int
    num_bytes: int
    num_calls: int = 0


@dataclass
class OpCosts:
    """By (phase, module, op, dtype, flops, bytes)."""

    by_key: dict[tuple[str, str | None, str, torch.dtype, int, int], int] = field(default_factory=dict)

    def add(self, place: Instant, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if op.namespace != "aten" or op.overloadpacket.__name__ in _MOVES_NOTHING:
            return
        tensors = tensors_in(args, kwargs)
        results = tensors_in(result)
        if not results or (all(any(_same(x, y) for y in tensors) for x in results) and not op._schema.is_mutable):
            return  # a view
        largest = max((*tensors, *results), key=torch.Tensor.numel)
        count: Any = flop_registry.get(op.overloadpacket)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        moved = sum(x.numel() * x.element_size() for x in tensors) + sum(
            x.numel() * x.element_size() for x in results if not any(x is y for y in tensors)
        )
        key = (place.phase, place.module, op.overloadpacket.__name__, largest.dtype, flops, moved)
        self.by_key[key] = self.by_key.get(key, 0) + 1

    def __iter__(self) -> Iterator[tuple[tuple[str, str | None, str, torch.dtype], OpCost]]:
        for (phase, module, op, dtype, flops, moved), calls in self.by_key.items():
            yield (phase, module, op, dtype), OpCost(flops, moved, calls)


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return math.prod(x.shape) == 0 or x.untyped_storage()._cdata == y.untyped_storage()._cdata
