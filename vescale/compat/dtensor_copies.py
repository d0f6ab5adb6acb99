"""Copies, pickles and storages of DTensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from vescale.compat.dtensor import local_of, make_dtensor, spec_of
from vescale.compat.patching import Changes
from vescale.errors import DTensorStorageError, SavedPartWarning

__all__ = ["refuse_storages", "wrap_copying"]


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
        if protocol == _OF_TORCH_SAVE:
            _warn_of_part(self)
        return reduce(_aligned(self) if _is_inside(self) else self, protocol)

    for method in (__deepcopy__, __reduce_ex__):
        changes.attribute(DTensor, method.__name__, method)


def refuse_storages(changes: Changes, _: Any) -> None:
    def is_shared(self: Any) -> bool:
        return local_of(self).is_shared()

    def refusing(advice: str) -> Callable[..., NoReturn]:
        def refused(self: Any) -> NoReturn:
            raise DTensorStorageError(
                f"storage() of a DTensor of shape {tuple(self.shape)} placed as {tuple(self.placements)}: it has no memory "
                f"of its own, and to_local() is this rank's part. {advice}"
            )

        return refused

    changes.attribute(DTensor, "is_shared", is_shared)
    for name, advice in _NO_MEMORY.items():
        changes.attribute(DTensor, name, refusing(advice))


_NO_MEMORY = {
    "storage": "To write a file (safetensors), give it whole tensors, x.full_tensor() on all ranks, or save with "
    "vescale.checkpoint.save, and export (`vescale ckpt export`)",
    # Of share_memory(), where the process would crash, and of FullyShardedDataParallel, which frees what it has flattened.
    "_typed_storage": "Its memory can neither be shared between processes nor freed: call share_memory_() of x.to_local(); "
    "and leave FullyShardedDataParallel out, for the parameters are distributed already",
}
_OF_TORCH_SAVE = 2
"""torch.save's protocol; copies, queues and process groups pickle with newer ones."""
_WARNED: list[bool] = []


def _warn_of_part(x: Any) -> None:
    """Of the first DTensor in this process of which other ranks have parts, too."""
    spec = spec_of(x)
    cut = [a for a, p in enumerate(spec.placements) if not p.is_replicate() and spec.mesh.size(a) > 1]
    if _WARNED or not cut or local_of(x).is_meta:
        return
    _WARNED.append(True)
    warnings.warn(
        SavedPartWarning(
            f"torch.save writes this rank's part {tuple(local_of(x).shape)} of a DTensor of shape {tuple(x.shape)} placed "
            f"as {spec.placements}, not the whole tensor: the file can be loaded on this rank of an equal mesh only. Save "
            "the model on all ranks with vescale.checkpoint.save (any mesh loads it), or the whole values: `state = {name: "
            'x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in model.state_dict().items()}` on all ranks, '
            "then torch.save(state, ...) on one"
        ),
        stacklevel=3,
    )


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
