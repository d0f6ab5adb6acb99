"""``WatchedState``: what a forward changes in Python, and holds again before it is repeated."""

from __future__ import annotations

import functools
import io
import operator
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from vescale.compat import bytes_of, no_torch_function, own_part, versions
from vescale.ir import WatchedForward

_MAX_BYTES = 1 << 20  # of a tensor whose values are compared


class PythonState:
    """What the recorded forward has changed: contents of objects, and tensors that are neither inputs nor buffers."""

    def __init__(self, objects: list[tuple[Any, Any]], tensors: list[torch.Tensor]) -> None:
        self._objects, self._tensors = objects, tensors

    def saved(self) -> list[Callable[[], None]]:
        """What brings back the state of now."""
        made: list[Callable[[], None]] = []
        made += [functools.partial(kind.put, item, kind.read(item)) for kind, item in self._objects]
        with torch.no_grad(), no_torch_function():
            made += [functools.partial(_copy, x, own_part(x).clone()) for x in self._tensors]
        return made


class WatchedState:
    """The state that is found from a model when its forward begins, and what functions name that call torch functions."""

    def __init__(self, model: nn.Module) -> None:
        self._forward = WatchedForward(model)
        self._codes: set[types.CodeType] = set()
        self._tensors: list[tuple[torch.Tensor, Any, Callable[[], Any]]] = []
        self._iterators: list[tuple[str, Any, Any]] = []
        for name, value, read in self._forward.values():
            if isinstance(value, torch.Tensor) and not value.is_inference():
                self._tensors.append((value, _content(value), read))
            elif isinstance(value, Iterator) and not isinstance(value, io.IOBase):
                self._iterators.append((name, value, _position(value)))

    def add_frame(self, frame: types.FrameType) -> None:
        """Of a function of the model that is about to call a torch function."""
        if frame.f_code not in self._codes:
            self._codes.add(frame.f_code)
            self._forward.enter(frame.f_code, frame.f_globals)

    def changed(self) -> PythonState:
        """What is not as it was."""
        tensors = [x for x, before, _ in self._tensors if not x.is_meta and _content(x) != before]
        return PythonState(self._forward.changed(), tensors)

    def plain(self, used: Collection[int]) -> list[Callable[[], Any]]:
        """What tells the tensors that are held where some were that the forward has used; ``used``: the ``id`` of these."""
        return [read for x, _, read in self._tensors if id(x) in used]

    def advanced(self) -> str:
        """The name of an iterator that is not, or may not be, where it was; "" if there is none."""
        return next((name for name, it, state in self._iterators if state is None or _position(it) != state), "")


def _content(x: torch.Tensor) -> Any:
    """What tells whether a tensor was written to; not all writes are counted, as those of numpy."""
    own = own_part(x)
    is_read = own.is_cpu and own.layout is torch.strided and own.nbytes <= _MAX_BYTES
    return versions(x), hash(bytes_of(own).numpy().tobytes()) if is_read else 0


def _position(iterator: Any) -> Any:
    """What tells whether an iterator has advanced; None: nothing does."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, repr(frame.f_locals))
    shown, left = repr(iterator), operator.length_hint(iterator, -1)
    return None if left < 0 and " object at " in shown else (shown, left)


def _copy(x: torch.Tensor, kept: torch.Tensor) -> None:
    with torch.no_grad(), no_torch_function():
        own_part(x).copy_(kept)
