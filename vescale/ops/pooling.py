"""Pooling of inputs that PyTorch's rules do not know: to one element, and without a batch dim."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F

from vescale.ops._context import OpContext
from vescale.ops._registration import handles, is_spread, replaces
from vescale.ops.statistics import mean

__all__: list[str] = []

_aten = torch.ops.aten

# function -> number of trailing dims that it averages
_NUM_DIMS: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}


@replaces(*_NUM_DIMS)
def _adaptive_average(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``func(input, output_size)``; to one element as a mean. Torch itself decomposes that, changes strides in place and,
    in backward, copies to a tensor with the strides of the base: DTensor has no rules for these."""
    call = _SIGNATURE.bind(*args, **kwargs).arguments
    x, size, num_dims = call["input"], call["output_size"], _NUM_DIMS[func]
    size = [size] * num_dims if isinstance(size, int) else list(size)
    if size != [1] * num_dims or x.ndim not in (num_dims + 1, num_dims + 2):
        return func(*args, **kwargs)
    return mean(context, torch.mean, (x, list(range(-num_dims, 0)), True), {})


def _has_no_batch(op: Any, schema: Any) -> bool:
    return schema.args_schema[0].ndim == _NUM_SPATIAL[op] + 1 and is_spread(op, schema)


_NUM_SPATIAL = {
    _aten._adaptive_avg_pool2d_backward.default: 2,
    _aten.max_unpool2d.default: 2,
    _aten.max_unpool3d.default: 3,
}


@handles(*_NUM_SPATIAL, applies=_has_no_batch)
def _with_batch(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same with a batch of one. PyTorch's rule runs each rank on its part of dim 1, which without a batch is not the
    channels but a dim that is pooled."""
    args = tuple(x.unsqueeze(0) if isinstance(x, torch.Tensor) else x for x in args)
    return op(*args, **kwargs).squeeze(0)


_SIGNATURE = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("input", "output_size")]
)
