"""``grad`` of many parameters at once: one call takes them all, or gives them all, and none becomes a Python object."""

from __future__ import annotations

import ctypes
import functools
import operator
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from vescale import csrc
from vescale.compat.autograd import are_dtensors_unheld
from vescale.compat.dtensor import local_of, spec_of

# Multi-tensor kernels, which have underscores in their names and documentation under them.


def has_foreach(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these tensors: dense ones of exactly ``torch.Tensor`` on a native device."""
    return (
        set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        and {t.device.type for t in tensors} <= {"cpu", *_get_foreach_kernels_supported_devices()}
        and not any(t.is_sparse for t in tensors)
    )


def foreach_norm(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each tensor, all of one dtype, accumulated and returned in ``dtype``. Kernels compute norms of
    complex tensors in the dtype of their parts."""
    wanted = None if tensors[0].is_complex() else dtype
    return list(torch._foreach_norm(list(tensors), order, dtype=wanted))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(list(tensors), factor)


def foreach_copy_(tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(tensors), list(sources))


_address_of = operator.attrgetter("_cdata")


class TensorRow:
    """Tensors that are used together again and again, and where C++ finds them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._module: Any = csrc.load_module("dispatch")
        self._known: list[int] = []
        self._array: Any = None

    def addresses(self) -> Any:
        """As they are now: what a Python tensor stands for can be swapped (``torch.utils.swap_tensors``), and freed."""
        now = list(map(_address_of, self.tensors))
        if now != self._known:
            self._known, self._array = now, (ctypes.c_void_p * len(now))(*now)
        return self._array

    def are_dtensors_unheld(self, parts: list[torch.Tensor], specs: list[Any]) -> bool:
        """Whether each is a DTensor with this local tensor and spec, and nothing holds it, or its local tensor, but this
        row and ``parts``."""
        if self._module is not None:
            return bool(self._module.are_dtensors_unheld(self.tensors, parts, specs))
        return are_dtensors_unheld(self.tensors, parts, specs)


class ParameterRow(TensorRow):
    """Parameters whose gradients are moved together. Nothing that is moved is recorded for autograd.

    Args:
        specs: of the gradient of each parameter, a DTensor whose local tensor is moved; None of one that is plain. By
            default all are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], specs: Sequence[Any] = ()) -> None:
        super().__init__(parameters)
        self._library = _library()
        self._specs = list(specs)
        self.has_dtensors = any(spec is not None for spec in specs)

    def take_grads(self, targets: TensorRow, dtype: torch.dtype) -> bool:
        """Copy each ``grad`` to its target and leave None. Returns False, and changes nothing, unless each is there, dense
        and of ``dtype``, which targets need not be, and in its place already or outside of the targets' memory."""
        if self.tensors and targets.tensors[0].dtype == dtype and self._take_natively(targets):
            return True
        specs = self._specs or [None] * len(self.tensors)
        parts = [dense_part(parameter.grad, spec, dtype) for parameter, spec in zip(self.tensors, specs)]
        gradients = [part for part in parts if part is not None]
        if len(gradients) < len(self.tensors):
            return False
        for gradient, target in zip(gradients, targets.tensors, strict=True):
            if gradient.shape != target.shape:
                return False
            if share_memory(gradient, target) and gradient.data_ptr() != target.data_ptr():
                return False  # it could be overwritten before it is read
        with torch.no_grad():
            if gradients:
                foreach_copy_(targets.tensors, gradients)
        for parameter in self.tensors:
            parameter.grad = None
        return True

    def _take_natively(self, targets: TensorRow) -> bool:
        if self.has_dtensors:
            return self.take_local_grads(targets)
        library = self._library
        return library is not None and bool(
            library.take_grads(len(self.tensors), self.addresses(), targets.addresses())
        )

    def take_local_grads(
        self, targets: TensorRow, placed: Any = None, indices: list[int] | None = None, *, zeroes_signs: bool = False
    ) -> bool:
        """:meth:`take_grads` in C++, where gradients are DTensors; returns False where there is none.

        Args:
            placed: :attr:`ArrivalCount.placed_bytes`: those that are placed are in their targets already.
            indices: the slot of each parameter.
            zeroes_signs: replace -0.0 by 0.0 in the first element of each target, whose dtype is in ``ZEROED``.
        """
        if self._module is None:
            return False
        tensors, specs = self.tensors, self._specs
        return bool(self._module.take_local_grads(tensors, specs, targets.tensors, placed, indices or [], zeroes_signs))

    def first_hooked(self, *, before: bool) -> int:
        """The first parameter of which a program has hooked the node where its gradient arrives in a graph
        (``p.expand_as(p).grad_fn.next_functions``); -1: none. ``before``: hooks that run before it has arrived count, too.
        Without the C++ helper nothing tells."""
        library = self._library
        return -1 if library is None else int(library.first_hooked(len(self.tensors), self.addresses(), before))

    def have_grads(self) -> bool:
        """Whether any of them has a ``grad``."""
        if self._module is not None:
            return bool(self._module.gradients_of(self.tensors, []) != _NO_GRADIENTS)
        return any(parameter.grad is not None for parameter in self.tensors)

    def are_complete(self, specs: list[Any]) -> bool:
        """Whether each has a ``grad`` that is a DTensor with this very spec and an ordinary local tensor, and without a
        graph."""
        if self._module is not None:
            return bool(self._module.gradients_of(self.tensors, specs) == _COMPLETE_GRADIENTS)
        grads = [parameter.grad for parameter in self.tensors]
        return all(
            type(grad) is DTensor
            and spec_of(grad) is spec
            and type(local_of(grad)) is torch.Tensor
            and not grad.requires_grad
            for grad, spec in zip(grads, specs, strict=True)
        )

    def give_grads(self, gradients: TensorRow) -> bool:
        """Make each gradient its parameter's ``grad``. Returns False, and changes nothing, if a parameter has one."""
        if self._module is not None:  # which needs no addresses
            return bool(self._module.give_grads(self.tensors, gradients.tensors))
        if self._library is not None:
            return bool(self._library.give_grads(len(self.tensors), self.addresses(), gradients.addresses()))
        if any(parameter.grad is not None for parameter in self.tensors):
            return False
        for parameter, gradient in zip(self.tensors, gradients.tensors):
            parameter.grad = gradient
        return True


_NO_GRADIENTS, _COMPLETE_GRADIENTS = 0, 1  # of csrc/leaf_gradients.h
ZEROED = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
"""Dtypes whose -0.0 C++ replaces."""


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors inside of a subclass that have its memory; the tensor itself, if it is of none, or does not say."""
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain_parts(getattr(tensor, name))


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``one``, or a part of it, is in the same block as ``other``, which is of no subclass, wherever in it."""
    if type(one) is not torch.Tensor:
        parts = list(plain_parts(one))
        if len(parts) != 1 or parts[0] is not one:
            return any(share_memory(part, other) for part in parts)
    if one._is_zerotensor() or other._is_zerotensor():  # which have no memory
        return False
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def is_dense(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it is an ordinary dense tensor of ``dtype``, of no subclass."""
    return type(tensor) is torch.Tensor and tensor.dtype is dtype and tensor.layout is torch.strided


def dense_part(gradient: torch.Tensor | None, spec: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The local tensor of a gradient that is a DTensor with this spec, or with None the gradient itself; None unless it is
    that, and dense and of ``dtype``."""
    if spec is not None and gradient is not None:
        is_expected = type(gradient) is DTensor and not gradient.requires_grad and spec_of(gradient) == spec
        gradient = local_of(gradient) if is_expected else None  # type: ignore[arg-type]
    return gradient if gradient is not None and is_dense(gradient, dtype) else None


@functools.cache
def _typed(library: ctypes.CDLL) -> Any:
    """Its functions, called without letting go of the interpreter's lock: they may count references of Python objects."""
    prototype = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)
    found = {name: prototype((name, library)) for name in ("take_grads", "give_grads")}
    with_flag = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int)
    found["first_hooked"] = with_flag(("first_hooked", library))
    with_text = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
    return SimpleNamespace(**found, set_access_error=with_text(("set_access_error", library)))


def set_access_error(storage: torch.UntypedStorage, message: bytes | None) -> None:
    """Reads and writes of the memory raise a RuntimeError of ``message`` from now on; None: they work again. Without the C++
    helper this changes nothing."""
    library = _library()
    if library is not None:
        library.set_access_error(storage._cdata, message)


def _library() -> Any:
    library = csrc.load("grads")
    return None if library is None else _typed(library)
