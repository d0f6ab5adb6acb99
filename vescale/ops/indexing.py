"""``x[index]`` and ``x[index] = value`` on DTensors, with Python lists and numpy arrays among the indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from vescale.ops._context import OpContext
from vescale.ops._conversion import wrap_global
from vescale.ops._registration import replaces
from vescale.ops._registry import When
from vescale.ops.splitting import split
from vescale.placements import InterleavedShard

__all__: list[str] = []


@replaces(torch.Tensor.__getitem__, torch.Tensor.__setitem__, when=When.INDEX)
def _index_item(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, with lists and arrays among the indices converted to tensors that are the same on every rank."""
    x, index, *value = args
    if func is torch.Tensor.__getitem__ and isinstance(x, DTensor):
        part = _piece(context, x, index if isinstance(index, tuple) else (index,))
        if part is not None:
            return part
    items = tuple(_as_tensor(context, item) for item in (index if isinstance(index, tuple) else (index,)))
    if func is torch.Tensor.__setitem__ and any(_is_mask(item) for item in items):
        if len(items) == 1 and (not isinstance(value[0], torch.Tensor) or value[0].ndim == 0):
            mask = items[0]
            x.masked_fill_(mask.view(*mask.shape, *(1 for _ in range(x.ndim - mask.ndim))), value[0])
            return None
        # DTensor takes a mask for a vector of positions.
        items = tuple(part for item in items for part in (item.nonzero().unbind(1) if _is_mask(item) else (item,)))
    return func(x, items if isinstance(index, tuple) or len(items) > 1 else items[0], *value)


def _piece(context: OpContext, x: DTensor, index: tuple[Any, ...]) -> Any:
    """``x[..., start:stop]`` of exactly one chunk of an interleaved dim, computed by ``chunk``, so that neither it nor its
    gradient is redistributed. None for any other index."""
    cuts = [placement for placement in x.placements if isinstance(placement, InterleavedShard)]
    if len(cuts) != 1 or not all(item is ... or isinstance(item, slice) for item in index) or index.count(...) > 1:
        return None
    (cut,) = cuts
    rest = [slice(None)] * (x.ndim - sum(item is not ... for item in index))
    at = index.index(...) if ... in index else len(index)
    items = [*index[:at], *rest, *index[at + 1 :]]
    length, uneven = divmod(x.shape[cut.dim], cut.num_chunks)
    whole = all(item == slice(None) for dim, item in enumerate(items) if dim != cut.dim)
    start, stop, step = items[cut.dim].indices(x.shape[cut.dim])
    if uneven or not whole or step != 1 or stop - start != length or start % length:
        return None
    return split(context, torch.chunk, (x, cut.num_chunks, cut.dim), {})[start // length]


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.ndim > 0


def _as_tensor(context: OpContext, item: Any) -> Any:
    if not isinstance(item, list | range | np.ndarray):
        return item
    try:
        made = torch.tensor(item)
    except (TypeError, ValueError):
        return item  # a list of slices and the like stands for a tuple
    if made.dtype.is_floating_point:
        made = made.long()  # an empty list
    return wrap_global(made, context.mesh, context.replicated, "index")
