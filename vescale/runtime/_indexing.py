"""``x[index]`` and ``x[index] = value`` on DTensors, with Python lists and numpy arrays among the indices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vescale.runtime._boundary import wrap_global

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["index_item"]


def index_item(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule; index tensors that torch would make of lists are made here, the same on every rank."""
    x, index, *value = args
    items = tuple(_as_tensor(runtime, item) for item in (index if isinstance(index, tuple) else (index,)))
    if func is torch.Tensor.__setitem__ and any(_is_mask(item) for item in items):
        if len(items) == 1 and (not isinstance(value[0], torch.Tensor) or value[0].ndim == 0):
            mask = items[0]
            x.masked_fill_(mask.view(*mask.shape, *(1 for _ in range(x.ndim - mask.ndim))), value[0])
            return None
        # DTensor takes a mask for a vector of positions.
        items = tuple(part for item in items for part in (item.nonzero().unbind(1) if _is_mask(item) else (item,)))
    return func(x, items if isinstance(index, tuple) or len(items) > 1 else items[0], *value)


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.ndim > 0


def _as_tensor(runtime: Runtime, item: Any) -> Any:
    if not isinstance(item, list | range | np.ndarray):
        return item
    try:
        made = torch.tensor(item)
    except (TypeError, ValueError):
        return item  # a list of slices and the like stands for a tuple
    if made.dtype.is_floating_point:
        made = made.long()  # an empty list
    return wrap_global(made, runtime.mesh, runtime.replicated, "index")
