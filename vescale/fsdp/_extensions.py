"""Tensor subclasses that say themselves how they are gathered: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale.compat import AsyncCollectiveTensor, plain_parts
from vescale.errors import ArgumentTypeError, GatherHookError, UnsupportedParameterError, kind_of
from vescale.placements import contiguous_stride
from vescale.rng import is_deferred

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a parameter, or the local tensor of one, is of a class of its own, which must have the two hooks to be
    gathered."""
    if type(tensor) in (torch.Tensor, nn.Parameter) or is_deferred(tensor) or isinstance(tensor, AsyncCollectiveTensor):
        return False
    return type(tensor.data) is not torch.Tensor


def check_extended(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that has only one of the hooks, NotImplementedError for one around deferred tensors."""
    has = {hook: hasattr(tensor, hook) for hook in (PRE, POST)}
    if has[PRE] != has[POST]:
        (present,), (missing,) = ([hook for hook in has if has[hook] is wanted] for wanted in (True, False))
        raise GatherHookError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} is {kind_of(tensor)} with {present} and without "
            f"{missing}; fully_shard needs both to gather it: define {missing}, or delete {present}"
        )
    if any(is_deferred(part) for part in plain_parts(tensor)):
        raise UnsupportedParameterError(
            f"parameter {name!r} of shape {tuple(tensor.shape)} is {kind_of(tensor)} that wraps deferred tensors; "
            "fully_shard materializes plain parameters only. Build it on the meta device, or convert the parameter "
            "after vescale.materialize(model)"
        )


def require_hooks(name: str, tensor: torch.Tensor) -> None:
    """Before the first gather. Raises ValueError for one hook, NotImplementedError for none."""
    check_extended(name, tensor)
    if not hasattr(tensor, PRE):
        raise UnsupportedParameterError(
            f"parameter {name!r} is {kind_of(tensor)} of local shape {tuple(tensor.shape)}; fully_shard gathers "
            f"plain tensors, DTensors, and tensor subclasses with {PRE} and {POST}. Define both in the class, convert the "
            "parameter before fully_shard, or pass it in ignored_params"
        )


def refuse_hooks(plain: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises NotImplementedError for local tensors, of no subclass, that were given a hook."""
    for name, local in plain:
        if hasattr(local, PRE) or hasattr(local, POST):
            raise UnsupportedParameterError(
                f"the local tensor of parameter {name!r} is a plain tensor with {PRE} or {POST}; fully_shard calls "
                "these methods only for tensor subclasses, whose local tensors are chunks of dim 0. Convert the "
                "parameter to such a subclass before fully_shard"
            )


def check_one_kind(name: str, tensor: torch.Tensor, was_extended: bool) -> None:
    """Raises ValueError where a plain parameter was replaced by a tensor subclass after ``fully_shard``, or the reverse."""
    if is_extended(tensor) != was_extended:
        raise GatherHookError(
            f"parameter {name!r} was {'a tensor subclass' if was_extended else 'a plain tensor'} when it was passed "
            f"to fully_shard, but has been replaced by {kind_of(tensor.data)} since; convert parameters before "
            "fully_shard"
        )


def copied(local: torch.Tensor) -> torch.Tensor:
    """The same values in new memory, by the ops that a subclass must have to be sharded at all."""
    new = local.new_zeros(local.size())
    new.copy_(local)
    return new


def gather_inputs(
    name: str,
    local: torch.Tensor,
    mesh: DeviceMesh,
    shape: Sequence[int],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], Any]:
    """What a sharded tensor wants to have gathered, and the metadata that it wants back.

    Raises TypeError for a hook of another signature, and for an answer that is no tuple of tensors and metadata.
    """
    hook = getattr(local, PRE)
    if _num_arguments(getattr(hook, "__func__", hook), hasattr(hook, "__func__")) == 1:
        answer = hook(mesh)
    else:
        answer = hook(mesh, torch.Size(shape), contiguous_stride(shape), module, mp_policy)
    match answer:
        case (list() | tuple() as inputs, metadata) if all(isinstance(one, torch.Tensor) for one in inputs):
            return tuple(inputs), metadata
    raise ArgumentTypeError(
        f"{PRE} of parameter {name!r}, {kind_of(local)}, returned {_kind(answer)}; expected (a tuple of tensors, "
        "metadata)"
    )


@functools.lru_cache(maxsize=256)
def _num_arguments(function: Callable[..., Any], is_bound: bool) -> int:
    signature = inspect.signature(function)
    number = len(signature.parameters) - is_bound
    if number not in (1, 5):
        raise ArgumentTypeError(
            f"{PRE}{signature} takes {number} arguments in addition to the tensor; expected {PRE}(self, mesh), or "
            f"{PRE}(self, mesh, outer_size, outer_stride, module, mp_policy)"
        )
    return number


def unsharded_of(name: str, shape: Sequence[int], answer: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The unsharded tensor of ``shape`` and the inner tensors, from what ``fsdp_post_all_gather`` returned the first time.
    A tensor with more rows at its end, of padding, is cut.

    Raises TypeError for anything else, ValueError for a tensor of another shape.
    """
    match answer:
        case (torch.Tensor() as tensor, list() | tuple() as inner) if all(type(one) is torch.Tensor for one in inner):
            pass
        case _:
            raise ArgumentTypeError(
                f"{POST} of parameter {name!r} returned {_kind(answer)} the first time; expected (the unsharded "
                "tensor, a tuple of the plain tensors that hold its memory)"
            )
    if tuple(tensor.shape) != tuple(shape):
        if not tensor.is_contiguous() or tensor.numel() < math.prod(shape):
            raise GatherHookError(
                f"{POST} of parameter {name!r} returned a tensor of shape {tuple(tensor.shape)}, strides "
                f"{tuple(tensor.stride())}; expected {tuple(shape)}, or a contiguous tensor with padding rows at its "
                "end"
            )
        tensor = tensor.as_strided(tuple(shape), contiguous_stride(shape), tensor.storage_offset())
    return tensor, tuple(inner)


def _kind(answer: Any) -> str:
    if isinstance(answer, list | tuple):
        return f"({', '.join(map(_kind, answer))})"
    return type(answer).__name__
