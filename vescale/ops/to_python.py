"""Conversions of DTensors to Python values: ``tolist`` and ``numpy`` return the global value, and write nothing to it."""

from __future__ import annotations

from typing import Any

import torch

from vescale.compat import local_of, no_torch_function, read_only, tell_read
from vescale.ops._context import OpContext
from vescale.ops._conversion import bring
from vescale.ops._registry import replaces


@replaces(torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
def _to_python(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with no_torch_function():
        tell_read(args[0], f"{func.__name__}()", for_python=True)
        whole = local_of(bring(args[0], context.replicated, func.__name__, "self"))
        return read_only(args[0], func(whole, *args[1:], **kwargs))
