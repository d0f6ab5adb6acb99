"""Bases of tensor subclasses without memory of their own, and the dispatch modes and trees that go with them."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = [
    "FakeTensor",
    "MemorylessTensor",
    "TorchDispatchMode",
    "WrapperTensor",
    "detached_below_autograd",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
    "without_modes",
]


class MemorylessTensor(torch.Tensor):
    """A tensor that is a meta tensor inside and claims a real device; a subclass says what each op does.

    Views share the (empty) storage object, and assignments to ``.data`` exchange it: the storage identifies the values.
    """

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def around(cls, meta: torch.Tensor, device: torch.device) -> Self:
        """The tensor that shares ``meta``'s storage; ops on it, and ``.device``, go to ``__torch_dispatch__``."""
        tensor: Self = torch.Tensor._make_subclass(
            cls, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        return tensor

    def as_meta(self) -> torch.Tensor:
        """A plain meta tensor that shares the storage."""
        with torch.no_grad():
            alias = torch.empty(0, dtype=self.dtype, device="meta")
            return alias.set_(self.untyped_storage(), self.storage_offset(), self.size(), self.stride())


class WrapperTensor(torch.Tensor):
    """Base of tensors without storage of their own, whose subclass says in ``__torch_dispatch__`` what each op does."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl

    @classmethod
    def with_looks_of(cls, tensor: torch.Tensor) -> Self:
        wrapper: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            storage_offset=tensor.storage_offset(),
            dtype=tensor.dtype,
            device=tensor.device,
        )
        return wrapper


def detached_below_autograd(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` inside of a dispatch mode, where views do not share versions otherwise."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """A context in which no dispatch mode is active: ops do what they do outside of all."""
    return _disable_current_modes()
