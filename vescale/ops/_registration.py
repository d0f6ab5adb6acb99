"""Decorators with which a file of this package registers what runs in place of its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from vescale.compat import DTensorSpec, no_torch_function
from vescale.ops._registry import When, register

__all__ = ["handles", "is_spread", "replaces"]

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def handles(
    *ops: Any,
    applies: Callable[[Any, Any], bool] | None = None,
    takes_plain: bool = False,
    communicates: Iterable[str] = (),
) -> Callable[[Handler], Handler]:
    """Register a function ``(op, args, kwargs) -> result`` as the handler of ATen overloads; see :class:`OpEntry`.

    It runs without torch function modes: what it calls is not the model's code. ``communicates`` leaves out what moves
    operands to other placements (:func:`vescale.ops.bring`), which is implicit communication.
    """

    def decorate(function: Handler) -> Handler:
        def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with no_torch_function():
                return function(op, args, kwargs)

        for op in ops:
            register(op, handler=handler, applies=applies, takes_plain=takes_plain, communicates=communicates)
        return function

    return decorate


def replaces(
    *functions: Any,
    when: When = When.ALWAYS,
    changes: Callable[..., bool] | None = None,
    is_local: Callable[..., bool] | None = None,
    backward: str = "autograd",
    communicates: Iterable[str] = (),
) -> Callable[[Function], Function]:
    """Register a function ``(context, function, args, kwargs) -> result`` to run in place of torch functions inside of a
    parallelized model's forward; see :class:`OpEntry`. ``when`` or ``changes``: the calls in which it does something else
    than they."""

    def decorate(function: Function) -> Function:
        for replaced in functions:
            register(
                replaced,
                function=function,
                when=when,
                changes=changes,
                is_local=is_local,
                backward=backward,
                communicates=communicates,
            )
        return function

    return decorate


def is_spread(op: Any, schema: Any) -> bool:
    """Whether an operand is not Replicate, or a plain tensor. Stock DTensor runs the op where all operands are Replicate."""
    operands = (*schema.args_schema, *schema.kwargs_schema.values())
    return any(
        not all(p.is_replicate() for p in x.placements) if isinstance(x, DTensorSpec) else isinstance(x, torch.Tensor)
        for x in operands
    )
