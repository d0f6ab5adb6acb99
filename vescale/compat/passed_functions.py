"""Methods and attributes of DTensors without the model's function mode, where it passes them through
(``csrc/function_passes.h``)."""

from __future__ import annotations

import inspect
import types
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from vescale.compat.native_dispatch import native_passes
from vescale.compat.patching import Changes

__all__ = ["pass_methods"]

# Set by other patches, which would be taken back in another order.
_OTHERS = frozenset({"data"})
_BASE = torch._C.TensorBase


class _Seen(TorchFunctionMode):
    """Remembers the function, and does not call it."""

    function: Any = None

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.function = func
        return 0


def pass_methods(changes: Changes, _: Any) -> None:
    """Put descriptors in DTensor in front of the methods and attributes of PyTorch's C++ class. Without the C++ dispatcher,
    the mode is called for all of them."""
    passes = native_passes()
    if passes is None:
        return
    pass_method, pass_attribute = passes
    for name in sorted({*vars(_BASE), *vars(torch.Tensor)} - {*vars(DTensor), *_OTHERS}):
        found = inspect.getattr_static(torch.Tensor, name)
        if isinstance(found, types.GetSetDescriptorType) and not name.startswith("_"):
            changes.attribute(DTensor, name, pass_attribute(found, found.__get__))
        elif isinstance(found, types.MethodDescriptorType) or name == "__getitem__":
            function = _operator(name, found) if name.startswith("_") else found
            if function is not None:
                changes.attribute(DTensor, name, pass_method(torch.Tensor, found, function))


def _operator(name: str, method: Any) -> Any:
    """The function that a mode sees where an operator runs (``mul`` of ``x * y``); None for methods that are no operators,
    and for those of the right operand: Python asks a subclass for its own first, and ``plain / x`` would be another op."""
    if not name.startswith("__") or name.startswith("__r"):
        return None
    x = torch.zeros(1)
    for args in ((x,), (x, x)):
        with _Seen() as seen:
            try:
                method(*args)
            except TypeError:  # another number of operands
                continue
        if seen.function is not None:
            return seen.function
    return None
