"""The dims that PyTorch's sharding rules take a reduction for: an empty list of dims stands for all of them."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor._ops import _math_ops

from vescale.compat.patching import Changes

__all__ = ["reduce_all_where_none_is_named"]


def reduce_all_where_none_is_named(changes: Changes, _: Any) -> None:
    """``x.amax()``, whose ``dim`` is ``()``, and ``x.sum(dim=[])`` reduce every dim. PyTorch's rules take them for
    reductions of none, and the result of each rank's part, for the result."""
    original = _math_ops._infer_reduction_dims

    @functools.wraps(original)
    def infer_reduction_dims(dims: Any, ndim: int) -> list[int] | None:
        is_empty = isinstance(dims, list | tuple) and not dims
        return list(range(ndim)) if is_empty else original(dims, ndim)

    changes.function(original, infer_reduction_dims)
