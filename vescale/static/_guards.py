"""``Guards``: what a recorded step depended on besides the calls of torch functions that it made."""

from __future__ import annotations

import functools
import io
import operator
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale.compat import (
    GLOBAL_HOOKS,
    HOOKS_OF_MODULES,
    bytes_of,
    native_static,
    no_torch_function,
    own_part,
    versions,
)
from vescale.fsdp import ManagedParameter
from vescale.ir import ATTRIBUTES, Kind, WatchedForward, is_same

_CONTAINERS = ("_parameters", "_buffers", "_modules")
_REPLACED = "parameters, buffers, parts or forwards of modules were replaced"


class Guards:
    """Parameters, buffers, parts and hooks of modules, as of now.

    Args:
        managed: parameters of units, of which modules have one form or the other; by (``id`` of the module, name in it).
        replaced: (``id`` of the module, name in it) of buffers that each forward replaces.
    """

    def __init__(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        managed: Mapping[tuple[int, str], ManagedParameter],
        replaced: frozenset[tuple[int, str]] = frozenset(),
    ) -> None:
        self._hooks: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        self._containers: list[dict[str, Any]] = []
        self._paths: list[str] = []
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        for path, module in modules:
            held = module.__dict__
            self._hooks += [held[name] for name in HOOKS_OF_MODULES]
            if "forward" in held:  # an entry of the plan, around it
                self._add(held, "forward", held["forward"])
            for kind in _CONTAINERS:
                self._containers.append(held[kind])
                self._paths.append(path)
                for name, value in held[kind].items():
                    if (id(module), name) not in managed and (id(module), name) not in replaced:
                        self._add(held[kind], name, value)
        for parameter in dict.fromkeys(managed.values()):
            self._add(parameter.__dict__, "sharded", parameter.sharded)
        self._tensors = [x for x in self._values if isinstance(x, torch.Tensor)]
        self._requires_grad = [x.requires_grad for x in self._tensors]
        self._flags = dict(zip(map(id, self._tensors), self._requires_grad, strict=True))
        self._num_hooks = list(map(len, self._hooks))
        self._sizes = list(map(len, self._containers))
        self._native = native_static()

    def _add(self, held: dict[str, Any], name: str, value: Any) -> None:
        self._dicts.append(held)
        self._names.append(name)
        self._values.append(value)

    def requires_grad(self, x: torch.Tensor) -> bool:
        """Whether a parameter or buffer did, unless it is one that each forward replaces."""
        return self._flags.get(id(x), x.requires_grad)

    def drop_added_hooks(self) -> None:
        """Take away the hooks that a forward has added, which will be repeated."""
        for hooks, number in zip(self._hooks, self._num_hooks, strict=True):
            while len(hooks) > number:
                hooks.popitem()

    def unseen(self) -> str:
        """What a forward has changed that its static step passes over: calls run no hooks that it has added, and modules
        show what was there before; "" if there is nothing. A hook that it has taken away has had its effect."""
        if self._native.first_resized(self._hooks, self._num_hooks) >= 0 and any(
            len(hooks) > number for hooks, number in zip(self._hooks, self._num_hooks, strict=True)
        ):
            return "hooks of modules were added"
        return _REPLACED if self.have_replaced() else ""

    def have_replaced(self) -> bool:
        """Whether parameters, buffers or parts of modules are others."""
        return bool(self._native.first_changed(self._dicts, self._names, self._values) >= 0)

    def broken(self) -> str:
        """What has changed; "" if nothing has. It is called before each step, without torch function modes."""
        native = self._native
        if native.first_resized(self._hooks, self._num_hooks) >= 0:
            return "hooks of modules were added or removed"
        changed = native.first_resized(self._containers, self._sizes)
        if changed >= 0:
            return f"attributes or parts of {self._paths[changed] or 'the model'} were added or deleted"
        if native.first_other_flag(self._tensors, self._requires_grad) >= 0:
            return "requires_grad of parameters has changed"
        if self.have_replaced():
            return _REPLACED
        return ""


# ``WatchedState``: what a forward changes in Python, and holds again before it is repeated.


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
