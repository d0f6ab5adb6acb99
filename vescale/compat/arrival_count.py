"""``ArrivalCount``: how many gradients of a bucket have not arrived, counted by autograd's hooks without Python."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vescale import csrc


class GradientPlaces:
    """Where gradients that are DTensors may be copied to as they arrive.

    Args:
        tensors: for each slot, where the local tensor goes; None: nowhere.
        specs: for each slot, the spec that the gradient has to have.
    """

    def __init__(self, tensors: Sequence[torch.Tensor | None], specs: Sequence[Any]) -> None:
        self._held = list(tensors), list(specs)
        addresses = ctypes.c_void_p * len(self._held[0])
        self.targets = addresses(*(None if x is None else x._cdata for x in tensors))
        self.specs = addresses(*(None if spec is None else id(spec) for spec in specs))


class ArrivalCount:
    """Counts gradients by slot. While :meth:`start` is in force, hooks of parameters that :meth:`attach` was given count in
    C++, and call Python only where this parameter has other hooks, too, where a gradient arrives that is not expected or
    has a graph, and for the last one that is missing, which Python counts. A gradient that would be set in C++ (of a local
    tensor in static mode) is *placed*, if there is a place for it: copied there, so that no DTensor is made of it.

    Without the helper ``csrc/hook_gate.cpp`` Python is called for all of them, and counts them. The numbers are the same.

    Args:
        expected: how often a gradient of each slot arrives.
    """

    def __init__(self, expected: Sequence[int]) -> None:
        self._expected = list(expected)
        self._left, self._missing = list(expected), 0
        self._library = _library()
        self._count: Any = None
        self.placed_bytes: Any = None
        """A byte for each slot, which is not 0 where the gradient is placed; None: none can be."""
        if self._library is not None:
            self._count = self._library.new_count(len(expected), (ctypes.c_int32 * len(expected))(*expected))
            self.placed_bytes = (ctypes.c_uint8 * len(expected)).from_address(self._library.placed_of(self._count))
            weakref.finalize(self, self._library.free_count, self._count)

    def __reduce__(self) -> Any:
        return ArrivalCount, (self._expected,)  # a copy has a count of its own: the one in C++ goes with this object

    def reset(self, num_missing: int) -> None:
        """Nothing has arrived, or is placed; hooks call Python."""
        if self._library is not None:
            self._library.reset_count(self._count, num_missing)
            return
        self._left, self._missing = list(self._expected), num_missing

    @property
    def num_missing(self) -> int:
        return self._missing if self._library is None else int(self._library.num_missing(self._count))

    def add(self, index: int) -> None:
        """A gradient of this slot has arrived. One that arrives more often than expected does not stand for another."""
        if self._library is not None:
            self._library.add_arrival(self._count, index)
        elif self._left[index] > 0:
            self._left[index] -= 1
            self._missing -= 1

    def start(self, places: GradientPlaces | None = None) -> None:
        """Let hooks count until :meth:`stop` or :meth:`reset`, and place gradients. The caller keeps ``places``."""
        if self._library is None:
            return
        if places is None:
            self._library.start_counting(self._count, None, None)
        else:
            self._library.start_counting(self._count, places.targets, places.specs)

    def stop(self) -> None:
        """What is placed stays."""
        if self._library is not None:
            self._library.stop_counting(self._count)

    def placed(self) -> list[int]:
        """The slots whose gradients are placed."""
        return [index for index, is_placed in enumerate(self.placed_bytes or ()) if is_placed]

    def forget_placed(self) -> None:
        """They have been taken, or returned."""
        if self._library is not None:
            self._library.forget_placed(self._count)

    def attach(self, parameter: torch.Tensor, index: int) -> None:
        """Count the gradients that are accumulated in a leaf that has one hook for them, and no others' any more."""
        hooks: Any = parameter._post_accumulate_grad_hooks
        if self._library is not None and hooks:
            self._library.count_gradients(self._count, index, parameter._cdata, hooks)


def stop_counting_gradients(parameter: torch.Tensor) -> None:
    """Call the hooks of a leaf for each of its gradients again."""
    library = _library()
    if library is not None:
        library.count_gradients(None, 0, parameter._cdata, None)


@functools.cache
def _typed(library: ctypes.CDLL) -> Any:
    """Its functions, called without letting go of the interpreter's lock, which they need for a moment only."""

    def of(name: str, result: Any, *arguments: Any) -> Any:
        return ctypes.PYFUNCTYPE(result, *arguments)((name, library))

    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32
    return SimpleNamespace(
        new_count=of("new_count", address, size, address),
        free_count=of("free_count", None, address),
        reset_count=of("reset_count", None, address, number),
        start_counting=of("start_counting", None, address, address, address),
        stop_counting=of("stop_counting", None, address),
        placed_of=of("placed_of", address, address),
        forget_placed=of("forget_placed", None, address),
        add_arrival=of("add_arrival", None, address, size),
        num_missing=of("num_missing", number, address),
        count_gradients=of("count_gradients", None, address, size, address, ctypes.py_object),
    )


def _library() -> Any:
    library = csrc.load("hook_gate")
    return None if library is None else _typed(library)
