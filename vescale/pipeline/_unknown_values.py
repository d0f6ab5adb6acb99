"""Reads of values that a trace does not have: those of tensors that depend on parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LEAVES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class UnknownValueError(NotImplementedError):
    """Code in a trace asks for a value of a tensor on the meta device."""


class UnknownResultError(NotImplementedError):
    """An op cannot run on the meta device."""

    def __init__(self, op: Any, reason: str) -> None:
        super().__init__(f"{op}: {reason.splitlines()[0][:120]}")
        self.has_unknown_shape = torch.Tag.dynamic_output_shape in op.tags


def refuse_reading(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Before an op on these: raises UnknownValueError where it makes a Python value of one without values."""
    if torch.Tag.data_dependent_output in op.tags and any(t.is_meta for t in tensors):
        raise UnknownValueError(f"{op} reads a value that depends on parameters")


def refuse_leaving(func: Any, args: Sequence[Any]) -> None:
    """Before a torch function: raises UnknownValueError where it takes the values of a tensor out of PyTorch. (No op runs
    there, and PyTorch's own errors for it have several classes.)"""
    if func in _LEAVES and args and args[0].is_meta:
        raise UnknownValueError(f"Tensor.{func.__name__} reads values that depend on parameters")


def why_unknown(error: UnknownValueError | UnknownResultError) -> str:
    """What a forward does that raised ``error`` in a trace, and what to do about it, for a message."""
    if isinstance(error, UnknownValueError):
        return (
            f"branches on values of parameters, or reads them in Python ({error}), so that it is not known before the "
            "step what stages send; use torch.where in place of a branch, and return logged values instead of "
            "reading them"
        )
    if not error.has_unknown_shape:
        return (
            f"calls an op that cannot run without values ({error}), so that it is not known before the step what stages "
            "send; register a kernel that computes what it returns without values (PyTorch's register_fake), or use "
            "another op"
        )
    return (
        "has shapes that depend on the values of parameters, so that it is not known before the step what stages "
        f"send ({error}); in place of indexing by a mask, multiply by the mask and divide "
        "by its sum; for experts, add a local entry of kind experts for their module, or use an implementation "
        "without a loop (experts_implementation='grouped_mm')"
    )
