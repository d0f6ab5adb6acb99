"""``torch.cat`` on DTensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["concat"]


def concat(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, without the empty 1-D tensors that torch ignores (a key/value cache starts as one)."""
    tensors = args[0] if args else kwargs["tensors"]
    joined = [tensor for tensor in tensors if tensor.ndim != 1 or tensor.numel()] or list(tensors)
    if len(joined) == 1 and isinstance(joined[0], DTensor) and "out" not in kwargs:
        return joined[0].clone(memory_format=torch.contiguous_format)  # the rule gathers along a sharded dim
    if args:
        return func(joined, *args[1:], **kwargs)
    return func(**{**kwargs, "tensors": joined})
