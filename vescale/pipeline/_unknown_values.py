"""Reads of values that a trace does not have: those of tensors that depend on parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["UnknownValueError", "refuse_leaving", "refuse_reading"]

_LEAVES = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}


class UnknownValueError(NotImplementedError):
    """Code in a trace asks for a value of a tensor on the meta device."""


def refuse_reading(op: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Before an op on these: raises UnknownValueError where it makes a Python value of one without values."""
    if torch.Tag.data_dependent_output in op.tags and any(t.is_meta for t in tensors):
        raise UnknownValueError(f"{op} reads a value that depends on parameters")


def refuse_leaving(func: Any, args: Sequence[Any]) -> None:
    """Before a torch function: raises UnknownValueError where it takes the values of a tensor out of PyTorch. (No op runs
    there, and PyTorch's own errors for it have several classes.)"""
    if func in _LEAVES and args and args[0].is_meta:
        raise UnknownValueError(f"Tensor.{func.__name__} reads values that depend on parameters")
