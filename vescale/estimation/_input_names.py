"""Check of the names in a batch, for models whose forward takes any name by ``**kwargs``."""

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

_UNPACK = (typing.Unpack, typing_extensions.Unpack)  # different objects in Python 3.11; torch requires the package


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Check that the model reads the inputs ``names``.

    Raises TypeError for an unknown name if the forward declares all names that it takes, by its parameters or by
    ``**kwargs: Unpack[...]``. If its ``**kwargs`` have no such annotation, warns (EstimateWarning) of names that no module
    reads: other code may read them.
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
    """Names that a forward in the model takes as a parameter, declares in an annotation, or has as a constant in its code,
    as in ``kwargs["x"]``."""
    for kind in {type(module) for module in model.modules()}:
        forward = inspect.unwrap(kind.forward)
        for parameter in inspect.signature(forward).parameters.values():
            yield parameter.name
            yield from _declared(parameter)
        code = getattr(forward, "__code__", None)
        if isinstance(code, types.CodeType):
            yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _declared(parameter: inspect.Parameter) -> tuple[str, ...]:
    """The names of ``**kwargs: Unpack[SomeTypedDict]``; none for other parameters."""
    annotation: Any = parameter.annotation
    if parameter.kind is not parameter.VAR_KEYWORD or get_origin(annotation) not in _UNPACK:
        return ()
    (declared,) = get_args(annotation)
    return tuple(declared.__annotations__)
