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
from vescale.ir import ATTRIBUTES, Kind, WatchedForward, is_same

_MAX_BYTES = 1 << 20  # of a tensor whose values are compared


class PythonState:
    """Contents of the objects that a forward may change, and the tensors that the recorded one has written to, other than
    inputs and buffers."""

    def __init__(self, objects: list[tuple[Kind, Any]], tensors: list[torch.Tensor]) -> None:
        self._objects, self._tensors = objects, tensors
        self._reads = [_reader(kind, item) for kind, item in objects]

    def saved(self) -> Callable[[], None]:
        """What brings back the state of now."""
        contents = [read() for read in self._reads]
        with torch.no_grad(), no_torch_function():
            copies = [own_part(x).clone() for x in self._tensors]
        return functools.partial(self._restore, contents, copies)

    def _restore(self, contents: list[Any], copies: list[torch.Tensor]) -> None:
        for (kind, item), content in zip(self._objects, contents, strict=True):
            if not is_same(content, kind.read(item)):
                kind.put(item, content)
        with torch.no_grad(), no_torch_function():
            for x, kept in zip(self._tensors, copies, strict=True):
                own_part(x).copy_(kept)


def _reader(kind: Kind, item: Any) -> Callable[[], Any]:
    """What reads the content of an object before each step: for most of them, no function in Python."""
    held = vars(item) if isinstance(item, nn.Module) and kind is ATTRIBUTES else item
    if (
        kind.has_values
        and type(held) in (dict, list)
        and (held is not item or not isinstance(kind.read, functools.partial))
    ):
        return held.copy
    return functools.partial(kind.read, item)


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

    def state(self) -> PythonState:
        """All of it that a step may have to bring back. Of tensors, those that are not as they were."""
        tensors = [x for x, before, _ in self._tensors if not x.is_meta and _content(x) != before]
        return PythonState(self._forward.objects(), tensors)

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
