"""What runs in a static forward where the model calls a module that has no static forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from vescale.compat import call_module, with_torch_function
from vescale.static._call_site_functions import map_in_order
from vescale.static._tensor_type import TensorType, UnrecordedError

__all__ = ["on_dtensors", "refused"]


def on_dtensors(
    module: nn.Module,
    path: str,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    as_in_eager_mode: Callable[[], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """The module's call as in eager mode, between local tensors.

    Args:
        as_in_eager_mode: what the call runs in.
    """
    to_global = [functools.partial(kind.to_global, op=path) for kind in inputs]
    to_local = [kind.to_local for kind in outputs]

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_in_order((args, kwargs), to_global)
        with as_in_eager_mode(), with_torch_function():
            result = call_module(module, args, kwargs)
        return map_in_order(result, to_local)

    return call


def refused(reason: str) -> Callable[..., Any]:
    """The call of a module whose call was not recorded."""

    def call(*args: Any, **kwargs: Any) -> Any:
        raise UnrecordedError(reason)

    return call
