"""``torch.mul(x, y, out=empty)``: ops that give ``out`` its shape, which is the local tensor's alone in stock DTensor."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

__all__ = ["is_into_empty", "run_into_empty"]


@functools.cache
def _out_names(op: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in op._schema.arguments if argument.is_out)


def is_into_empty(op: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an ``out`` argument has no elements: it takes the shape of the result."""
    outs = (kwargs.get(name) for name in _out_names(op))
    return any(isinstance(out, DTensor) and out.numel() == 0 for out in outs)


def run_into_empty(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The op without ``out``, and its results in the tensors that were given; NotImplemented where these have elements."""
    if not is_into_empty(op, kwargs):
        return NotImplemented
    names = _out_names(op)
    function = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::"))
    found = function(*args, **{name: value for name, value in kwargs.items() if name not in names})
    outs: list[Any] = [kwargs[name] for name in names]
    for out, result in zip(outs, found if isinstance(found, tuple) else (found,), strict=True):
        out.data = result
    return outs[0] if len(outs) == 1 else tuple(outs)
