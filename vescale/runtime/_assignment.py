"""``x[index] = value`` on DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.placements import shard_dim
from vescale.runtime._boundary import convert
from vescale.runtime._runtime import locate

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["assign_item"]


def assign_item(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assign in place; where the index cuts a sharded dim, on a gathered copy whose part is written back.

    DTensor's own slice of a sharded dim is a gathered copy, so that writing to it would be lost. That communication is
    implicit.
    """
    x, index, value = args
    items = list(index) if isinstance(index, tuple) else [index]
    if not isinstance(x, DTensor) or _leaves_shards_whole(x, items):
        func(x, index, value)
        return
    target = tuple(Replicate() for _ in x.placements)
    where = locate()
    if where is not None:
        where.runtime.implicit(where, "Tensor.__setitem__", "self", None, x.placements, target)
    whole: Any = convert(x, target, who="implicit: Tensor.__setitem__").clone()
    if isinstance(value, DTensor) and tuple(value.placements) != target:
        value = convert(value, target, who="implicit: Tensor.__setitem__")
    func(whole, index, value)
    x.copy_(convert(whole, x.placements, who="Tensor.__setitem__"))


def _leaves_shards_whole(x: DTensor, items: list[Any]) -> bool:
    """Whether every sharded dim is taken whole, by full slices alone in front of it."""
    sharded = {dim for placement in x.placements if (dim := shard_dim(placement)) is not None}
    if any(placement.is_partial() for placement in x.placements):
        return False
    if not sharded:
        return True
    dim = 0
    for position, item in enumerate(items):
        if item is Ellipsis:
            dim = x.ndim - sum(1 for later in items[position + 1 :] if later is not None)
        elif item is None:
            continue
        elif isinstance(item, (torch.Tensor | list, bool)):
            return False
        else:
            if dim in sharded and item != slice(None):
                return False
            dim += 1
    return True
