"""``torch.mul(x, y, out=z)``: an empty ``z`` gets the shape of the result, in stock DTensor only its local tensor does.

What runs in place of an op runs in place of the same op with ``out``, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat.model_hooks import OpHandler


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
    return _run_into(getattr(torch.ops.aten, op._schema.name.removeprefix("aten::")), op, args, kwargs)


def with_out_variants(handlers: Mapping[Any, OpHandler]) -> dict[Any, OpHandler]:
    """The handlers, and for the overloads with ``out=`` of their ops: these handlers, and a copy of the results."""
    found = dict(handlers)
    for op, handler in handlers.items():
        for out in _out_variants(op):
            found.setdefault(out, OpHandler(functools.partial(_run_into, op), _applies_to(op, handler)))
    return found


def _out_variants(op: Any) -> list[Any]:
    packet = op.overloadpacket
    taken = [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return [
        other
        for other in overloads
        if other is not op
        and _out_names(other)
        and [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out] == taken
    ]


def _applies_to(op: Any, handler: OpHandler) -> Callable[[Any, Any], bool]:
    return lambda _, schema: handler.applies(op, schema)


def _run_into(function: Any, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    names = _out_names(op)
    found = function(*args, **{name: value for name, value in kwargs.items() if name not in names})
    outs: list[Any] = [kwargs[name] for name in names]
    for out, result in zip(outs, found if isinstance(found, tuple) else (found,), strict=True):
        if out.shape == result.shape:
            out.copy_(result)
        else:
            out.data = result
    return outs[0] if len(outs) == 1 else tuple(outs)
