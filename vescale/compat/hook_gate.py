"""``HookGate``: hooks of many tensors of which only the first call in a backward matters."""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

from vescale import csrc
from vescale.compat.autograd import current_backward
from vescale.compat.ledger import note

__all__ = ["HookGate", "addresses_about_hooks"]

_OPEN, _SHUT = -1, -2  # as in C++


class HookGate:
    """While the gate is shut, the autograd engine skips the hooks of the guarded tensors in backwards that accumulate all
    gradients. Hooks are called in ``torch.autograd.grad`` and ``backward(inputs=...)``.

    Without the helper ``csrc/hook_gate.cpp`` hooks are always called. A gate is therefore for hooks that do nothing when
    they are called in a backward while it is shut; it saves about 1 us per call.
    """

    def __init__(self) -> None:
        self._library = _library()
        self._state = ctypes.c_int64(_OPEN)
        if self._library is not None:
            self._gate = self._library.new_gate()
            self._state = ctypes.c_int64.from_address(self._library.state_of(self._gate))
            weakref.finalize(self, self._library.free_gate, self._gate)

    def __reduce__(self) -> Any:
        return HookGate, ()  # a copy has a gate of its own: the one in C++ goes with this object

    def guard(self, tensor: torch.Tensor) -> None:
        """Put a leaf, which has one hook, behind the gate. Hooks that it gets later are called whether it is shut or not."""
        if self._library is not None:
            note("compat.hook_gate:torch", tensor)
            self._library.guard(self._gate, tensor._cdata, tensor._backward_hooks)

    def release(self, tensor: torch.Tensor) -> None:
        """The hooks of a tensor are no longer behind any gate."""
        if self._library is not None:
            self._library.unguard(tensor._cdata)

    def shut(self) -> None:
        self._state.value = _SHUT

    def shut_here(self) -> None:
        """For the running backward: hooks are called in one that another thread runs meanwhile."""
        self._state.value = current_backward()

    def open(self) -> None:
        self._state.value = _OPEN


def addresses_about_hooks() -> tuple[int, int, int]:
    """Of the functions by which other C++ code asks whether a hook would be skipped now, whether one only counts gradients
    (:class:`ArrivalCount`), and has that one place a gradient; 0 where there is none."""
    library = _library()
    if library is None:
        return 0, 0, 0
    functions = library.lets_pass, library.is_only_count, library.place_gradient
    found = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return found[0], found[1], found[2]


@functools.cache
def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.new_gate.restype = ctypes.c_void_p
    library.free_gate.argtypes = [ctypes.c_void_p]
    library.free_gate.restype = None
    library.state_of.argtypes = [ctypes.c_void_p]
    library.state_of.restype = ctypes.c_void_p
    library.guard.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.py_object]
    library.unguard.argtypes = [ctypes.c_void_p]
    library.unguard.restype = None
    return library


def _library() -> ctypes.CDLL | None:
    library = csrc.load("hook_gate")
    return None if library is None else _typed(library)
