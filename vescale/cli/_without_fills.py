"""``WithoutFills``: initializers do nothing to tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FILLS = frozenset(getattr(torch.Tensor, name) for name in ("uniform_", "normal_", "fill_", "zero_"))


class WithoutFills(TorchFunctionMode):
    """Inside, fills of tensors on the meta device, and functions of ``torch.nn.init``, return them as they are: PyTorch
    takes random ones apart in Python, a millisecond each."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _FILLS or getattr(func, "__module__", None) == "torch.nn.init":
            filled = args[0] if args else (kwargs or {}).get("tensor")
            if isinstance(filled, torch.Tensor) and filled.is_meta:
                return filled
        return func(*args, **(kwargs or {}))
