"""Adaptive average pooling to one element, computed as a mean.

Torch's own decomposition changes strides in place and, in backward, copies to a tensor with the strides of the base: DTensor
has no rules for these.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from vescale.ops._context import OpContext
from vescale.ops._registration import replaces
from vescale.ops.statistics import mean

__all__: list[str] = []

# function -> number of trailing dims that it averages
_NUM_DIMS: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


@replaces(*_NUM_DIMS)
def _adaptive_average(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, output_size)``."""
    call = _SIGNATURE.bind(*args, **kwargs).arguments
    x, size, num_dims = call["input"], call["output_size"], _NUM_DIMS[func]
    size = [size] * num_dims if isinstance(size, int) else list(size)
    if size != [1] * num_dims or x.ndim not in (num_dims + 1, num_dims + 2):
        return func(*args, **kwargs)
    return mean(context, torch.mean, (x, list(range(-num_dims, 0)), True), {})


_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("input", "output_size")]
)
