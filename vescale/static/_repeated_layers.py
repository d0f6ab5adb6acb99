"""``RepeatedLayers``: layers of one type, of which torch functions are recorded once."""

from __future__ import annotations

import ast
import dis
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import CALL_OVERRIDE, HOOKS_OF_MODULES, local_of, native_static, spec_of
from vescale.fsdp import state_of
from vescale.runtime import Runtime
from vescale.static._call_tree import CallTree, FunctionCall
from vescale.static._function_trace import FunctionTrace, structure
from vescale.static._source import source_of
from vescale.static._state import is_inside

__all__ = ["RepeatedLayers"]

_LEFT_OUT = frozenset((*nn.Module().__dict__, CALL_OVERRIDE)) - {"training"}
_MIN_LAYERS = 5  # of a list, below which each is recorded
_ALL = "<all>"  # attributes may be read
_MISSING = object()
_ASKED = ("__getattribute__", "__getattr__")  # for a name that another instruction has
_READS_ALL = frozenset(("vars", "__dict__", "__getattribute__"))


@dataclass
class _Template:
    """The only call of a layer that is recorded. ``form``: what it was given, and the settings of the thread."""

    form: Any
    is_done: bool = False
    read: frozenset[str] | None = None


class RepeatedLayers:
    """In a list of modules, the layers after the second and before the last that are like the second one, the template.

    Their functions run as in eager mode. Which instructions ran is noted, what torch functions were given and returned, and
    the tensors at the boundaries of modules in them, with gradients. What was recorded of the template then holds for them,
    if all of this is the same in both. A layer with another value of an attribute that the template may have read is
    recorded. The first and the last layer have other neighbors.

    Methods get the :class:`Recorder` of the step, and its records of tensors.

    Args:
        is_on: whether there are any.

    Attributes:
        repeats: the path of the template, by that of each layer that ran like it.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, is_on: bool) -> None:
        self.repeats: dict[str, str] = {}
        self._templates: dict[str, _Template | None] = {}
        self._alike: dict[str, tuple[str, frozenset[str]]] = {}  # by path: the template, and attributes that differ
        self._traces: dict[str, FunctionTrace] = {}
        self._running: list[FunctionTrace] = []
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
        """Before the call of a part of the model: whether its functions need not be recorded."""
        if path in self._templates:
            is_second = self._templates[path] is not None
            self._templates[path] = _Template(_form(given, inputs))
            if is_second:
                del self._templates[path]
            self._trace(recorder, path)
            return False
        first, differing = self._alike.get(path, ("", frozenset[str]()))
        template = self._templates.get(first)
        if template is None or path in recorder.module_calls or not template.is_done or recorder.recomputes:
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
        self._trace(recorder, path)
        return True

    def _trace(self, recorder: Any, path: str) -> None:
        self._traces[path] = trace = FunctionTrace(path, recorder.name_of)
        self._running.append(trace)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """After each torch function: returns its result."""
        for trace in self._running:
            trace.note(func, args, kwargs, result)
        return result

    def end(self, path: str) -> None:
        """After the call."""
        if self._running and self._running[-1].layer == path:
            self._running.pop().end()
        template = self._templates.get(path)
        if template is not None:
            template.is_done = True

    def differs(self, recorder: Any) -> str:
        """After the backward: the path of a layer that did not run like its template; "" if all did."""
        forwards, calls = self._by_layer(recorder.tree.forwards), self._by_layer(recorder.module_calls)
        boundaries = {
            layer: {name: [_boundary(*call) for call in own] for name, own in parts.items()}
            for layer, parts in calls.items()
        }
        for path, first in self.repeats.items():
            if any(is_inside(name, path) for name in recorder.named):
                return path  # functions outside of the layer use its parameters, too
            own, others = forwards[first], forwards[path]
            if own.keys() != others.keys() or not all(_ran_alike(own[name], others[name]) for name in own):
                return path
            trace, template = self._traces[path], self._traces[first]
            if boundaries[first] != boundaries[path] or trace.calls != template.calls:
                return path
            if trace.gradients != template.gradients:
                return path
        return ""

    def functions(self, tree: CallTree) -> Iterator[tuple[FunctionCall, FunctionCall]]:
        """Each function of a template, and the one at its place in a layer that ran like it."""
        forwards = self._by_layer(tree.forwards)
        for path, first in self.repeats.items():
            for name, forward in forwards[first].items():
                yield from zip(forward.all_below(), forwards[path][name].all_below(), strict=True)

    def add_gradients(self, grads: dict[str, Any]) -> None:
        """Add the parameters of these layers to ``grads``, which has those of the templates by name."""
        parts = self._by_layer(grads)
        for path, first in self.repeats.items():
            for name, found in parts[first].items():
                grads.setdefault(path + name, found)
            for outer in parts:  # a template may have repeated layers itself
                if outer != path and is_inside(path, outer):
                    parts[outer].update(
                        (path.removeprefix(outer) + name, found) for name, found in parts[first].items()
                    )

    def _by_layer(self, found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """What has a name in a template or in a layer that ran like it, by the rest of its name."""
        layers: dict[str, dict[str, Any]] = {layer: {} for layer in (*self.repeats.values(), *self.repeats)}
        for path, value in found.items():
            outer = path
            while outer:
                if outer in layers:
                    layers[outer][path.removeprefix(outer)] = value
                outer = outer.rpartition(".")[0]
        return layers


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


def _boundary(inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
    """What a module was given and returned, with the placements of gradients."""
    return [[(_kind(x), None if x.value is None else x.value.grads) for x in records] for records in (inputs, outputs)]


def _names_read(tree: CallTree, layer: str) -> Iterator[str]:
    """Attributes that the functions of a layer may have read: names in instructions that ran, and all texts."""
    for forward in _inside(tree.forwards, layer).values():
        for call in forward.all_below():
            for code, part in call.parts.items():
                ran = {offset for number, offset in call.visits if number == part}
                yield from (i.argval for i in dis.get_instructions(code) if i.offset in ran and type(i.argval) is str)
                yield from (constant for constant in code.co_consts if type(constant) is str)
                if call.code.co_name not in _ASKED and (
                    _READS_ALL.intersection(code.co_names) or ("getattr" in code.co_names and _computes_names(call))
                ):
                    yield _ALL


def _computes_names(call: FunctionCall) -> bool:
    """Whether a function asks for an attribute whose name is no constant."""
    source = source_of(call.code)
    nodes = () if source is None else source.nodes
    asks = [n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "getattr"]
    uses = [n for n in nodes if isinstance(n, ast.Name) and n.id == "getattr"]
    constant = [n for n in asks if len(n.args) > 1 and isinstance(n.args[1], ast.Constant)]
    return source is None or len(constant) < len(uses)


def _ran_alike(one: FunctionCall, other: FunctionCall) -> bool:
    """Whether the same instructions of the same functions ran, as often."""
    if one.code is not other.code or one.is_direct != other.is_direct or one.owner is not other.owner:
        return False
    if not dict.__eq__(one.visits, other.visits):  # that of counters takes longer
        return False
    if list(one.called) != list(other.called):
        return False
    return all(map(_ran_alike, one.called.values(), other.called.values()))
