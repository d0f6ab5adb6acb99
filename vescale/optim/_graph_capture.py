"""Refuses to capture a step whose numbers the host computes: replays of the graph would repeat those of the first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from vescale.compat.devices import is_capturing
from vescale.errors import OptimizerOptionError

P = ParamSpec("P")
R = TypeVar("R")


def check_no_capture(what: str, fix: str) -> None:
    """Raises ValueError while the current stream is captured. ``what`` the host computes, and the edit."""
    if is_capturing():
        raise OptimizerOptionError(
            f"a step is being captured in a graph, and the host computes {what}: every replay would repeat it; {fix}"
        )


def eagerly(step: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` call a step as it is: owners, stores and kernels in C++ are nothing that can be traced."""

    @functools.wraps(step)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(step)(*args, **kwargs)
        return step(*args, **kwargs)

    return call
