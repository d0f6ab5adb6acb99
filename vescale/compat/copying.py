"""Copies and pickles of DTensors whose local tensor is a part of a larger storage, as gradients in buckets do."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat.dtensor import local_of, make_dtensor, spec_of
from vescale.compat.patching import Changes

__all__ = ["wrap_copying"]


def wrap_copying(changes: Changes, _: Any) -> None:
    """``Tensor.__deepcopy__`` and ``Tensor.__reduce_ex__`` (``torch/_tensor.py``, 2.13) recognize a tensor without memory of
    its own by its address 0. A DTensor's is its local tensor's offset: if it is not 0, they fail ("invalid python storage").
    """
    deepcopy, reduce = DTensor.__deepcopy__, DTensor.__reduce_ex__

    @functools.wraps(deepcopy)
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not self.is_leaf or not _is_inside(self):
            return deepcopy(self, memo)
        aligned = _aligned(self)
        aligned.grad = self.grad
        copied = memo[id(self)] = deepcopy(aligned, memo)
        del memo[id(aligned)]  # which another object may get
        return copied

    @functools.wraps(reduce)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        return reduce(_aligned(self) if _is_inside(self) else self, protocol)

    for method in (__deepcopy__, __reduce_ex__):
        changes.attribute(DTensor, method.__name__, method)


def _is_inside(x: Any) -> bool:
    local = local_of(x)
    return type(x) is DTensor and type(local) is torch.Tensor and local.storage_offset() > 0 and not local.is_meta


def _aligned(x: Any) -> DTensor:
    """``x`` over the same memory, seen as a storage of its own, for ``copy.copy`` shares it."""
    local = local_of(x).detach()
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride())) if local.numel() else -1
    begin, itemsize = local.storage_offset(), local.itemsize
    storage = local.untyped_storage()[begin * itemsize : (begin + last + 1) * itemsize]
    local = local.new_empty(0).set_(storage, 0, local.shape, local.stride())
    twin = make_dtensor(local, spec_of(x), requires_grad=x.requires_grad)
    twin.__dict__.update(x.__dict__)
    return twin
