"""Torch functions that read sizes, or take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Functions that read sizes of a tensor: the model sees global ones.
SIZE_READERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.shape.__get__: lambda sizes: sizes,  # type: ignore[attr-defined]
    torch.Tensor.size: lambda sizes, dim=None: sizes if dim is None else sizes[dim],
    torch.Tensor.__len__: lambda sizes: sizes[0],
    torch.Tensor.numel: lambda sizes: sizes.numel(),
    torch.Tensor.nelement: lambda sizes: sizes.numel(),
    torch.numel: lambda sizes: sizes.numel(),
}
# Methods that are given the sizes of their result, as numbers or one sequence: the model gives global ones.
SIZE_TAKERS = frozenset(
    getattr(torch.Tensor, name) for name in ("view", "reshape", "expand", "new_empty", "new_zeros", "new_ones")
)
# Those of which only the form of the result can be compared.
VALUES_ARE_UNDEFINED = frozenset((torch.Tensor.new_empty,))
