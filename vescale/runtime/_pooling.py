"""Adaptive average pooling to one element: the mean that it is.

What torch makes of it changes strides in place and, in backward, copies to a tensor of the base's strides: DTensor has no
rules for these.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from vescale.runtime._statistics import mean

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = ["POOLINGS", "pooled"]

# function -> how many trailing dims it goes along
POOLINGS: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


def pooled(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, output_size)``."""
    call = _SIGNATURE.bind(*args, **kwargs).arguments
    x, size, num_dims = call["input"], call["output_size"], POOLINGS[func]
    size = [size] * num_dims if isinstance(size, int) else list(size)
    if size != [1] * num_dims or x.ndim not in (num_dims + 1, num_dims + 2):
        return func(*args, **kwargs)
    return mean(runtime, torch.mean, (x, list(range(-num_dims, 0)), True), {})


_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("input", "output_size")]
)
