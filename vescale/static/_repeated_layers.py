"""``RepeatedLayers``: layers of one type, of which torch functions are recorded once."""

from __future__ import annotations

import ast
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import (
    CALL_OVERRIDE,
    HOOKS_OF_MODULES,
    local_of,
    native_static,
    no_torch_function,
    spec_of,
    tensors_in,
)
from vescale.fsdp import state_of
from vescale.runtime import Runtime
from vescale.static._call_tree import CallTree, FunctionCall, is_recorded
from vescale.static._held_values import SCALARS
from vescale.static._source import source_of
from vescale.static._state import is_inside

# ``LayerTrace``: what a layer did in a recorded step, in a form that layers have in common.

_PLAIN = SCALARS - {slice}  # which may have tensors in it


class LayerTrace:
    """Calls of torch functions and modules: from which instructions, what they were given and returned, and which placements
    gradients had (``csrc/layer_trace.h``).

    Args:
        frame: of the function that calls the layer.
        path: of the layer.
        placements: a dictionary that traces share, in which they find equal placements.
        like: the trace that this one is compared with as it grows; None: this one is kept.
    """

    def __init__(
        self, frame: types.FrameType, path: str, placements: dict[Any, Any], like: LayerTrace | None = None
    ) -> None:
        self.path = path
        self._objects: list[Any] = [] if like is None else like._objects
        self._native: Any = native_static().LayerTrace(
            frame, f"{path}.", placements, None if like is None else like._native
        )

    def note(self, called: Any, given: Any, returned: Any, names: dict[int, str]) -> None:
        """After a call. ``names``: of parameters and buffers, by ``id``."""
        self._native.note(self._objects, called, given, returned, names, is_recorded)

    def end(self) -> None:
        """After the forward of the layer."""
        self._native.end(self._objects)

    @property
    def differs(self) -> bool:
        """After the backward: whether anything was other than in the trace that this one is compared with."""
        return self._native.differs()


def structure(value: Any, of_tensor: Callable[[torch.Tensor], Any]) -> Any:
    """Containers, slices, numbers, flags and texts by what they are, objects by identity; tensors as ``of_tensor`` says."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, torch.Tensor):
        return of_tensor(value)
    if isinstance(value, list | tuple):
        return type(value), tuple(structure(item, of_tensor) for item in value)
    if isinstance(value, dict):
        return type(value), tuple((key, structure(item, of_tensor)) for key, item in value.items())
    if isinstance(value, slice):
        return slice, structure((value.start, value.stop, value.step), of_tensor)
    return _Same(value)


@dataclass(frozen=True, eq=False)
class _Same:
    """An object, equal to itself only."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


_LEFT_OUT = frozenset((*nn.Module().__dict__, CALL_OVERRIDE)) - {"training"}
_MIN_LAYERS = 5  # of a list, below which each is recorded
_ALL = "<all>"  # attributes may be read
_MISSING = object()
_ASKED = ("__getattribute__", "__getattr__")  # for a name that another instruction has
_READS_ALL = frozenset(("vars", "__dict__", "__getattribute__"))


@dataclass
class _Template:
    """The only call of a layer that is recorded.

    Attributes:
        form: what it was given, and the settings of the thread.
        trace: what it did.
        decided: of ``CallTree.decided``, what it has added; None while it runs.
        read: names of attributes that it may have read.
    """

    form: Any
    trace: LayerTrace
    first_decided: int
    decided: slice | None = None
    read: frozenset[str] | None = None


class RepeatedLayers:
    """In a list of modules, the layers after the second and before the last that are like the second one, the template.

    Their functions run as in eager mode, and are not followed. It is noted from where torch functions were called, what they
    and modules were given and returned, and which placements gradients had. What was recorded of the template then holds for
    them, if all of this is the same in both. Branches are not compared: a static step refuses those that the template has
    not taken. A layer with another value of an attribute that the template may have read is recorded. The first and the
    last layer have other neighbors.

    Methods get the :class:`Recorder` of the step, and its records of tensors.

    Args:
        is_on: whether there are any.

    Attributes:
        repeats: the path of the template, by that of each layer that ran like it.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, is_on: bool) -> None:
        self.repeats: dict[str, str] = {}
        self._repeats_of: dict[str, list[str]] = {}
        self._templates: dict[str, _Template | None] = {}
        self._alike: dict[str, tuple[str, frozenset[str]]] = {}  # by path: the template, and attributes that differ
        self._traces: list[LayerTrace] = []  # of the repeats
        self._running: list[LayerTrace] = []
        self._placements: dict[Any, Any] = {}
        self._differs = ""
        if not is_on or any(state_of(module) is not None for module in model.modules()):
            return
        entries: dict[str, list[Any]] = {}
        for instruction in runtime.program:
            entries.setdefault(instruction.path, []).append((instruction.target, instruction.index, instruction.op))
        for path, module in model.named_modules():
            if isinstance(module, nn.ModuleList) and len(module) >= _MIN_LAYERS:
                names = [f"{path}.{name}" if path else name for name in module._modules]
                self._templates[names[1]] = None
                for name, layer in list(zip(names, module))[2:-1]:
                    differing = _differing_names(module[1], layer, names[1], name, entries)
                    if differing is not None:
                        self._alike[name] = names[1], differing

    def begin(self, recorder: Any, path: str, given: Any, inputs: Sequence[Any]) -> bool:
        """Before the call of a part of the model, in the function that calls it: whether it need not be recorded."""
        if path in self._templates:
            if self._templates[path] is not None:  # a second call
                del self._templates[path]
                if path in self._repeats_of:
                    self._differs = path
            else:
                trace = LayerTrace(sys._getframe(1), path, self._placements)
                self._templates[path] = _Template(_form(given, inputs), trace, len(recorder.tree.decided))
                self._running.append(trace)
            return False
        if path in self.repeats:
            self._differs = path
        first, differing = self._alike.get(path, ("", frozenset[str]()))
        template = self._templates.get(first)
        if template is None or path in recorder.module_calls or template.decided is None or recorder.recomputes:
            return False
        if any(is_inside(problem, outer) for problem in recorder.problems for outer in (first, path)):
            return False
        if any(is_inside(region, first) for region in recorder.regions) or template.form != _form(given, inputs):
            return False
        if template.read is None:
            template.read = frozenset(_names_read(recorder.tree, first))
        if differing and (_ALL in template.read or differing & template.read):
            return False
        self.repeats[path] = first
        self._repeats_of.setdefault(first, []).append(path)
        trace = LayerTrace(sys._getframe(1), path, self._placements, template.trace)
        self._running.append(trace)
        self._traces.append(trace)
        return True

    def note(self, names: dict[int, str], called: Any, given: Any, returned: Any) -> Any:
        """After each torch function: returns its result. ``names``: of parameters and buffers, by ``id``."""
        if self._running:
            with no_torch_function():
                for trace in self._running:
                    trace.note(called, given, returned, names)
        return returned

    def note_part(self, names: dict[int, str], part: tuple[str, str], given: Any, returned: Any) -> None:
        """After the call of a module, or what an entry of the plan does at its boundary. Only tensors are compared.

        Args:
            part: the path of the module, and the text of the entry.
        """
        for trace in self._running:
            name = part[0].removeprefix(trace.path), part[1]
            trace.note(name, list(tensors_in(given)), list(tensors_in(returned)), names)

    def end(self, recorder: Any, path: str) -> None:
        """After the call."""
        if not self._running or self._running[-1].path != path:
            return
        self._running.pop().end()
        template = self._templates.get(path)
        if template is not None:
            template.decided = slice(template.first_decided, len(recorder.tree.decided))
        elif path in self.repeats:
            template = self._templates[self.repeats[path]]
            assert template is not None and template.decided is not None
            recorder.tree.repeat_decided(template.decided, self.repeats[path], path)

    def abandon(self, path: str) -> None:
        """After an exception in the call, which the model may catch."""
        while any(trace.path == path for trace in self._running):
            self._differs = self._running.pop().path

    def differs(self, recorder: Any) -> str:
        """After the backward: the path of a layer that did not run like its template; "" if all did."""
        if self._differs:
            return self._differs
        outside = list(recorder.named)  # what functions outside of the repeated layers use
        for trace in self._traces:
            if trace.differs or any(is_inside(name, trace.path) for name in outside):
                return trace.path
        return ""

    def origin(self, path: str) -> str:
        """The module that was recorded in place of one; itself for others. Templates may have repeated layers themselves."""
        outer = path
        while outer:
            first = self.repeats.get(outer)
            if first is not None:
                return self.origin(first + path.removeprefix(outer))
            outer = outer.rpartition(".")[0]
        return path

    def counterparts(self, path: str) -> Iterator[str]:
        """The names in repeated layers at the place of a module's or a tensor's."""
        outer = path
        while outer:
            for other in self._repeats_of.get(outer, ()):
                made = other + path.removeprefix(outer)
                yield made
                yield from self.counterparts(made)
            outer = outer.rpartition(".")[0]


def _inside(found: Mapping[str, Any], outer: str) -> dict[str, Any]:
    return {path.removeprefix(outer): value for path, value in found.items() if path and is_inside(path, outer)}


def _differing_names(
    one: nn.Module, other: nn.Module, path: str, other_path: str, entries: Mapping[str, Any]
) -> frozenset[str] | None:
    """Names of attributes that differ; None if the modules are of two kinds, or an entry of the plan is for one of them."""
    parts, others = list(one.named_modules()), list(other.named_modules())
    if [(name, type(part)) for name, part in parts] != [(name, type(part)) for name, part in others]:
        return None
    differing = set()
    for (name, part), (_, counterpart) in zip(parts, others):
        own, theirs = (f"{outer}.{name}" if name else outer for outer in (path, other_path))
        if entries.get(own) != entries.get(theirs):
            return None
        held, held_there = part.__dict__, counterpart.__dict__
        if any(len(held[hooks]) != len(held_there[hooks]) for hooks in HOOKS_OF_MODULES):
            return None
        for kind in ("_parameters", "_buffers"):
            if list(held[kind]) != list(held_there[kind]):
                return None
            if not all(map(_are_alike, held[kind].values(), held_there[kind].values())):
                return None
        for attribute in (held.keys() | held_there.keys()) - _LEFT_OUT:
            value, value_there = held.get(attribute, _MISSING), held_there.get(attribute, _MISSING)
            if value is not value_there and structure(value, id) != structure(value_there, id):
                differing.add(attribute)
    return frozenset(differing)


def _are_alike(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Whether two parameters or buffers are of one kind, and are not the same."""
    if x is None or y is None:
        return x is y
    if x is y or type(x) is not type(y) or x.requires_grad != y.requires_grad:
        return False
    if isinstance(x, DTensor) and isinstance(y, DTensor):
        return spec_of(x) == spec_of(y) and local_of(x).stride() == local_of(y).stride()
    return x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and x.stride() == y.stride()


def _form(given: Any, inputs: Sequence[Any]) -> Any:
    """What decides about a call: arguments without tensors, forms of tensors, and the settings of the thread."""
    return native_static().thread_settings(), structure(given, type), [_kind(x) for x in inputs]


def _kind(record: Any) -> Any:
    return record.placements, record.shape, record.local_shape, record.strides, record.dtype, record.requires_grad


def _names_read(tree: CallTree, layer: str) -> Iterator[str]:
    """Attributes that the functions of a layer may have read: names in instructions that ran, and all texts."""
    for forward in _inside(tree.forwards, layer).values():
        for call in forward.all_below():
            for code, part in call.parts.items():
                yield from (name for offset, name in _names_in(code) if (part, offset) in call.visits)
                yield from (constant for constant in code.co_consts if type(constant) is str)
                if call.code.co_name not in _ASKED and (
                    _READS_ALL.intersection(code.co_names) or ("getattr" in code.co_names and _computes_names(call))
                ):
                    yield _ALL


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> list[tuple[int, str]]:
    """The texts that instructions use, with their offsets."""
    return [(one.offset, one.argval) for one in dis.get_instructions(code) if type(one.argval) is str]


def _computes_names(call: FunctionCall) -> bool:
    """Whether a function asks for an attribute whose name is no constant."""
    source = source_of(call.code)
    nodes = () if source is None else source.nodes
    asks = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr"]
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == "getattr"]
    constant = [n for n in asks if len(n.args) > 1 and isinstance(n.args[1], ast.Constant)]
    return source is None or len(constant) < len(uses)
