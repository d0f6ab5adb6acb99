"""``grad`` of many parameters at once: one call takes them all, or gives them all, and none becomes a Python object."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vescale import csrc
from vescale.compat.foreach import foreach_copy_

__all__ = ["TensorRow", "give_grads", "is_dense", "take_grads"]

_address_of = operator.attrgetter("_cdata")


class TensorRow:
    """Tensors that are used together again and again, and where C++ finds them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._known: list[int] = []
        self._array: Any = None

    def __len__(self) -> int:
        return len(self.tensors)

    def addresses(self) -> Any:
        """As they are now: what a Python tensor stands for can be swapped."""
        now = list(map(_address_of, self.tensors))
        if now != self._known:
            self._known, self._array = now, (ctypes.c_void_p * len(now))(*now)
        return self._array


def take_grads(parameters: TensorRow, targets: TensorRow, dtype: torch.dtype) -> bool:
    """Copy ``grad`` of each parameter to its target and leave None. Returns False, and changes nothing, unless each is a
    dense ``torch.Tensor`` of ``dtype``. To be called where nothing is recorded for autograd."""
    if not targets.tensors:
        return True
    library = _library() if targets.tensors[0].dtype == dtype else None
    if library is not None and library.take_grads(len(parameters), parameters.addresses(), targets.addresses()):
        return True
    gradients = [parameter.grad for parameter in parameters.tensors]
    if not all(gradient is not None and is_dense(gradient, dtype) for gradient in gradients):
        return False
    foreach_copy_(targets.tensors, gradients)  # type: ignore[arg-type]
    for parameter in parameters.tensors:
        parameter.grad = None
    return True


def give_grads(parameters: TensorRow, gradients: TensorRow) -> bool:
    """Make each gradient its parameter's ``grad``. Returns False, and changes nothing, if a parameter has one."""
    library = _library()
    if library is not None:
        return bool(library.give_grads(len(parameters), parameters.addresses(), gradients.addresses()))
    if any(parameter.grad is not None for parameter in parameters.tensors):
        return False
    for parameter, gradient in zip(parameters.tensors, gradients.tensors):
        parameter.grad = gradient
    return True


def is_dense(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it is an ordinary dense tensor of ``dtype``, of no subclass."""
    return type(tensor) is torch.Tensor and tensor.dtype is dtype and tensor.layout is torch.strided


@functools.cache
def _typed(library: ctypes.CDLL) -> Any:
    """Its functions, called without letting go of the interpreter's lock: they may count references of Python objects."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    return SimpleNamespace(**{name: prototype((name, library)) for name in ("take_grads", "give_grads")})


def _library() -> Any:
    library = csrc.load("grads")
    return None if library is None else _typed(library)
