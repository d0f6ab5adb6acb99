"""Dtypes among the options of a group, as names: PyTorch's functions for state dicts gather no objects of other kinds."""

from __future__ import annotations

import torch

from vescale.errors import OptimizerOptionError

__all__ = ["dtype_name", "named_dtype"]


def dtype_name(given: object, option: str) -> str:
    """``"float32"`` of ``torch.float32``; of a name the name. Raises ValueError for anything but a floating dtype."""
    name = str(given).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise OptimizerOptionError(f"{option}={given}; give a floating dtype")
    return name


def named_dtype(name: str | torch.dtype) -> torch.dtype:
    """Also of a dtype, which older state dicts have."""
    found = name if isinstance(name, torch.dtype) else getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found
