"""Which names of inputs a model can use, where its forward takes any."""

from __future__ import annotations

import inspect
import types
import typing
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

import typing_extensions
from torch import nn

from vescale.errors import ArgumentTypeError, did_you_mean
from vescale.estimation._compare import EstimateWarning

__all__ = ["check_names"]

_UNPACK = (typing.Unpack, typing_extensions.Unpack)  # not the same in Python 3.11


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Find inputs that the model's forward does not have, or that its ``**kwargs`` accept and nothing in the model reads.

    Raises TypeError where the forward declares all that it takes: by its parameters, or with ``**kwargs: Unpack[...]``.
    Otherwise code that is not looked at may read a name: of one that no module reads, there is a warning.
    """
    parameters = inspect.signature(model.forward).parameters
    unknown = [name for name in names if name not in parameters]
    if not unknown:
        return
    forward = f"{type(model).__name__}.forward"
    rest = next((p for p in parameters.values() if p.kind is p.VAR_KEYWORD), None)
    if rest is None:
        raise ArgumentTypeError(f"batch: {forward} takes no {unknown[0]!r}; it takes {', '.join(parameters)}")
    known = set(_names_in(model))
    for name in unknown:
        if name in known:
            continue
        near = did_you_mean(name, [p for p in parameters if p != rest.name])
        if _declared(rest):
            raise ArgumentTypeError(f"batch: {forward} takes {name!r} by **{rest.name}, which do not declare it{near}")
        warnings.warn(
            f"batch: {forward} takes {name!r} by **{rest.name}, but no module reads it, so that it is not in the "
            f"estimate{near}",
            EstimateWarning,
            stacklevel=4,
        )


def _names_in(model: nn.Module) -> Iterator[str]:
    """All names that a forward in the model has as a parameter, declares, or has in its code, as in ``kwargs["x"]``."""
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for parameter in inspect.signature(forward).parameters.values():
            yield parameter.name
            yield from _declared(parameter)
        code = getattr(forward, "__code__", None)
        if isinstance(code, types.CodeType):
            yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _declared(parameter: inspect.Parameter) -> tuple[str, ...]:
    """Of ``**kwargs: Unpack[SomeTypedDict]``."""
    annotation: Any = parameter.annotation
    if parameter.kind is not parameter.VAR_KEYWORD or get_origin(annotation) not in _UNPACK:
        return ()
    (declared,) = get_args(annotation)
    return tuple(declared.__annotations__)
