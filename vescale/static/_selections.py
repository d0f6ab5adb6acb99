"""``Selections``: what a recorded forward chose tensors from by values that no guard compares, and without a branch."""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.compat import no_torch_function
from vescale.static._call_tree import FunctionCall, is_of_torch, is_recorded
from vescale.static._fixed_arguments import CallArguments
from vescale.static._fixed_indices import FixedIndices
from vescale.static._held_values import is_value, read_attribute
from vescale.static._record import Call, ModuleCall, TensorRecord
from vescale.static._selection_points import parents_of
from vescale.static._source import FunctionSource, source_of
from vescale.static._tensor_type import merged_types, types_of

# ``FrameValues``: what expressions of a running function have in them, without running any.

_MISSING = object()
_MAX_DEPTH = 6
# They return no tensors, or all that they get, in its order.
_WITHOUT_TENSORS = frozenset((
    abs, all, any, bool, bytes, callable, complex, delattr, dir, divmod, float, format, hasattr, hash, id, int, isinstance,
    issubclass, len, object, pow, print, range, repr, round, slice, str, type,
))  # fmt: skip
_IN_ORDER = frozenset((enumerate, iter, list, next, reversed, sum, super, tuple, zip))
_READS_NAMES = frozenset((getattr, setattr))
_READS_ALL = frozenset((eval, exec, globals, locals, vars))
_MODES = (torch.set_grad_enabled, torch.inference_mode, torch.autocast)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_CONTAINERS_OF_MODULES = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
_KEYED_METHODS = frozenset(("get", "pop", "insert", "setdefault", "__getitem__", "__setitem__", "__delitem__"))
_METHODS_IN_ORDER = frozenset(
    ("append", "appendleft", "clear", "copy", "count", "extend", "items", "keys", "popleft", "update", "values")
)
_LIBRARIES_IN_ORDER = frozenset(
    ("contextlib", "copy", "dataclasses", "inspect", "logging", "math", "typing", "warnings")
)
_NUMBERS_OF_TENSORS = frozenset(("device", "dtype", "is_leaf", "layout", "ndim", "requires_grad", "shape"))
_METHODS_FOR_NUMBERS = frozenset(("dim", "element_size", "item", "numel", "size", "stride", "storage_offset", "tolist"))


@dataclass
class Given:
    """What may be chosen from.

    Attributes:
        indices: expressions that decide; empty: whatever runs there.
        tensors, modules: by ``id``.
        computed: expressions that may give others, which have not run yet.
        called: modules that give others.
        unknown: whether there may be others, of which nothing is known.
    """

    indices: tuple[ast.AST, ...] = ()
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)
    modules: dict[int, nn.Module] = field(default_factory=dict)
    computed: list[ast.AST] = field(default_factory=list)
    called: dict[int, nn.Module] = field(default_factory=dict)
    unknown: bool = False

    @property
    def is_open(self) -> bool:
        """Whether there may be several."""
        return self.unknown or bool(self.computed or self.called) or len(self.tensors) > 1 or len(self.modules) > 1


class FrameValues:
    """Reads names, attributes and items, for which no code of the model runs."""

    def __init__(self, frame: types.FrameType) -> None:
        self._locals, self._globals = frame.f_locals, frame.f_globals

    def given(self, node: ast.AST, parents: Mapping[int, ast.AST]) -> Given | None:
        """What a node that may select chooses from; None: it does not."""
        found = Given()
        parent = parents.get(id(node))
        match node:
            case ast.Subscript(value=held, slice=index):
                if isinstance(self._value(held), torch.Tensor):
                    return None
                found.indices = tuple(_parts(index))
                self._add(held, found)
                if isinstance(parent, ast.Assign | ast.AugAssign) and not isinstance(node.ctx, ast.Load):
                    self._add(parent.value, found)
            case ast.Dict(keys=keys, values=values):
                found.indices = tuple(key for key in keys if key is not None)
                self._add_all(values, found)
            case ast.Set(elts=items):
                self._add_all(items, found)
            case ast.BinOp(left=left, right=right):  # a display, so many times
                found.indices = (right if isinstance(left, ast.List | ast.Tuple | ast.ListComp) else left,)
                self._add_value(self._locals, found)
            case ast.Call():
                return self._given_to(node, found, is_dropped=isinstance(parent, ast.Expr))
        return found

    def sets_mode(self, node: ast.Call) -> bool:
        """Whether a call with arguments decides about gradients or autocast."""
        called = self._called(node.func) if node.args or node.keywords else None
        return called in _MODES or (isinstance(called, type) and issubclass(called, _MODES))

    def _given_to(self, node: ast.Call, found: Given, is_dropped: bool) -> Given | None:
        called = self._called(node.func)
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if called in _READS_ALL:
            self._add_value(self._locals, found)
            return found
        if called in _READS_NAMES and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant):
                return None
            found.indices = (node.args[1],)
            self._add_attributes(self._value(node.args[0]), found)
            self._add_all(node.args[2:], found)
            return found
        if isinstance(node.func, ast.Attribute):
            held = self._value(node.func.value)
            if isinstance(held, torch.Tensor | str | nn.Module):
                return None
            if isinstance(held, _CONTAINERS):
                if node.func.attr in _METHODS_IN_ORDER or (node.func.attr == "pop" and not node.args):
                    return None
                if node.func.attr in _KEYED_METHODS:
                    found.indices = tuple(node.args[:1])
                    arguments = arguments[1:]
            self._add(node.func.value, found)
        if self._is_harmless(called, node.args):
            return None
        if is_dropped and not any(isinstance(self._value(a), list | dict | deque) for a in self._operands(node)):
            return None
        self._add_all(arguments, found)
        return found

    def _operands(self, node: ast.Call) -> Iterable[ast.AST]:
        yield from node.args
        yield from (keyword.value for keyword in node.keywords)
        if isinstance(node.func, ast.Attribute):
            yield node.func.value

    def _called(self, node: ast.AST) -> Any:
        """The function that a call runs, inside of ``functools.partial`` and bound methods."""
        called = self._value(node)
        while isinstance(called, functools.partial):
            called = called.func
        called = getattr(called, "__func__", called) if not isinstance(called, nn.Module | torch.Tensor) else called
        try:  # a frozen object may hold a list, and a weak reference to what has gone has no hash, either
            hash(called)
        except TypeError:
            return _MISSING
        return called

    def _is_harmless(self, called: Any, arguments: list[ast.expr]) -> bool:
        """Whether a function is one of the model's, which is recorded itself, one of PyTorch's, or one that leaves the order
        of things as it is."""
        if isinstance(called, nn.Module) or called in _WITHOUT_TENSORS or called in _IN_ORDER:
            return True
        if called is dict:
            return all(_is_items(argument) or isinstance(self._value(argument), dict) for argument in arguments[:1])
        if called is functools.partial and arguments:
            return self._is_harmless(self._called(arguments[0]), [])
        if isinstance(called, types.FunctionType):
            file = called.__code__.co_filename
            return is_recorded(file) or is_of_torch(file) or _package(called) in _LIBRARIES_IN_ORDER
        if isinstance(called, type):
            file = getattr(sys.modules.get(called.__module__), "__file__", None) or ""
            return is_recorded(file) or is_of_torch(file) or called.__module__ in _LIBRARIES_IN_ORDER
        if isinstance(called, types.BuiltinFunctionType | types.MethodDescriptorType):
            return _package(called) in ("torch", *_LIBRARIES_IN_ORDER)
        call = inspect.getattr_static(type(called), "__call__", None)
        return isinstance(call, types.FunctionType) and is_recorded(call.__code__.co_filename)

    # Values

    def _value(self, node: ast.AST) -> Any:
        match node:
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                for names in (self._locals, self._globals, builtins.__dict__):
                    if name in names:
                        return names[name]
            case ast.Attribute(value=holder, attr=name):
                return _attribute(self._value(holder), name)
            case ast.Subscript(value=holder, slice=index):
                held, key = self._value(holder), self._value(index)
                if isinstance(held, nn.ModuleList | nn.Sequential | nn.ModuleDict):
                    held = held._modules
                    key = str(key % len(held)) if isinstance(key, int) and held else key
                is_known = isinstance(held, list | tuple) and type(key) is int and -len(held) <= key < len(held)
                if is_known or (isinstance(held, dict) and isinstance(key, str | int) and key in held):
                    return held[key]
        return _MISSING

    def _add_all(self, nodes: Iterable[ast.AST], found: Given) -> None:
        for node in nodes:
            self._add(node, found)

    def _add(self, node: ast.AST, found: Given) -> None:
        """Add what an expression may have in it."""
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.Lambda() | ast.Slice():
                pass
            case ast.Name():
                value = self._value(node)
                found.unknown |= isinstance(value, Iterator)
                self._add_value(value, found)
            case ast.Attribute(value=holder, attr=name):
                held, value = self._value(holder), self._value(node)
                if value is not _MISSING:
                    self._add_value(value, found)
                elif not isinstance(held, torch.Tensor):
                    self._add(holder, found)  # a property
                elif name not in _NUMBERS_OF_TENSORS:
                    found.computed.append(node)
            case ast.Subscript(slice=ast.Constant()) if self._value(node) is not _MISSING:
                self._add_value(self._value(node), found)
            case ast.Subscript(value=holder):
                if isinstance(self._value(holder), torch.Tensor):
                    found.computed.append(node)
                else:
                    self._add(holder, found)
            case ast.BinOp() | ast.UnaryOp() | ast.Compare():
                inner = Given()
                self._add_all(ast.iter_child_nodes(node), inner)
                if inner.tensors or inner.computed or inner.called or inner.unknown:
                    found.computed.append(node)
                    found.tensors |= inner.tensors
                    found.called |= inner.called
                    found.unknown |= inner.unknown
            case ast.Call():
                self._add_result(node, found)
            case ast.expr() | ast.comprehension():
                self._add_all(ast.iter_child_nodes(node), found)

    def _add_result(self, node: ast.Call, found: Given) -> None:
        """What a function may return: some of what it gets or has in its closure, and what torch functions compute in it."""
        called = self._called(node.func)
        if called in _WITHOUT_TENSORS or (
            isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS_FOR_NUMBERS
        ):
            return
        if isinstance(called, nn.Module):
            found.called[id(called)] = called
            return
        if called is _MISSING and not isinstance(node.func, ast.Attribute):
            found.unknown = True
            return
        found.computed.append(node)
        if _package(called) == "torch":
            return
        if _is_of_super(node.func):
            self._add_value(next(iter(self._locals.values()), None), found)
        for cell in getattr(called, "__closure__", None) or ():
            self._add_value(read_attribute(cell, "cell_contents"), found)
        self._add_all(self._operands(node), found)

    def _add_value(self, value: Any, found: Given, depth: int = 0) -> None:
        if isinstance(value, torch.Tensor):
            found.tensors[id(value)] = value
        elif isinstance(value, _CONTAINERS_OF_MODULES):
            self._add_attributes(value, found)
        elif isinstance(value, nn.Module):
            found.modules[id(value)] = value
        elif depth < _MAX_DEPTH:
            for item in _items(value):
                self._add_value(item, found, depth + 1)

    def _add_attributes(self, value: Any, found: Given) -> None:
        if isinstance(value, nn.Module):
            for item in (*value._parameters.values(), *value._buffers.values(), *value._modules.values()):
                self._add_value(item, found)
        else:
            self._add_value(value, found)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(dict.values(value))
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, type | types.ModuleType | types.FunctionType | str):
        return ()
    held = getattr(value, "__dict__", None)
    return list(held.values()) if isinstance(held, dict) else ()


def _attribute(holder: Any, name: str) -> Any:
    if holder is _MISSING or isinstance(holder, torch.Tensor):
        return _MISSING
    if isinstance(holder, nn.Module):
        for held in (holder.__dict__, holder._parameters, holder._buffers, holder._modules):
            if name in held:
                return held[name]
    found = inspect.getattr_static(holder, name, _MISSING)
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    if isinstance(found, types.MemberDescriptorType | types.GetSetDescriptorType):
        try:
            return found.__get__(holder)
        except AttributeError:
            return _MISSING
    return _MISSING if isinstance(found, property | functools.cached_property) else found


def _package(function: Any) -> str:
    owner = getattr(function, "__objclass__", function)
    module = getattr(owner, "__module__", None) or getattr(getattr(owner, "__self__", None), "__module__", None)
    return (module if isinstance(module, str) else "").partition(".")[0]


def _is_items(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="items"), args=[]):
            return True
    return False


def _is_of_super(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
            return True
    return False


def _parts(node: ast.AST) -> Iterable[ast.AST]:
    match node:
        case ast.Slice(lower=lower, upper=upper, step=step):
            return [part for part in (lower, upper, step) if part is not None]
        case ast.Tuple(elts=items):
            return list(itertools.chain.from_iterable(map(_parts, items)))
    return [node]


CallsBySite = Mapping[FunctionCall, Mapping[tuple[int, int], list[Call]]]
_Module = tuple[
    str, tuple[Any, ...]
]  # its path, names and placements of its parameters and buffers, and its attributes


@dataclass(eq=False)
class _Selection:
    """A place where one of several tensors or modules may have been chosen.

    Attributes:
        indices: expressions that decide; empty: whatever runs there.
        tensors, modules: that were there, each time that the place was reached.
        computed: nodes whose results are among them.
        called: paths of modules whose results are among them.
        unknown: whether there may be others, of which nothing is known.
    """

    indices: tuple[ast.AST, ...]
    tensors: list[list[TensorRecord]] = field(default_factory=list)
    modules: list[list[_Module]] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    called: set[str] = field(default_factory=set)
    unknown: bool = False


class Selections:
    """Items of containers, and functions that may give back some of the tensors that they get.

    Args:
        record: of a tensor.
        is_recorded: whether the functions of the running module are recorded: a layer that stands for others is enough.
        model: whose modules may be chosen.
    """

    def __init__(
        self, record: Callable[[torch.Tensor], TensorRecord], is_recorded: Callable[[], bool], model: nn.Module
    ) -> None:
        self._record, self._is_recorded = record, is_recorded
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._found: dict[FunctionCall, dict[int, _Selection]] = {}
        self._modes: dict[FunctionCall, set[int]] = {}  # calls that decide about gradients or autocast

    def note(self, frame: types.FrameType, call: FunctionCall, nodes: tuple[int, ...]) -> None:
        """Before instructions of ``nodes`` run."""
        source = source_of(call.code)
        assert source is not None
        if not self._is_recorded():
            return
        with no_torch_function():
            values = FrameValues(frame)
            for number in nodes:
                node = source.nodes[number]
                if isinstance(node, ast.Call) and values.sets_mode(node):
                    self._modes.setdefault(call, set()).add(number)
                given = values.given(node, parents_of(source))
                if given is None or not given.is_open:
                    continue
                found = self._found.setdefault(call, {}).setdefault(number, _Selection(given.indices))
                found.unknown |= given.unknown or any(id(module) not in self._paths for module in given.called.values())
                found.called.update(
                    self._paths[id(module)] for module in given.called.values() if id(module) in self._paths
                )
                found.computed.update(source.numbers[id(part)] for part in given.computed)
                found.tensors.append([self._record(x) for x in given.tensors.values()])
                found.modules.append([self._module(module) for module in given.modules.values()])

    def _module(self, module: nn.Module) -> _Module:
        held = [*module.named_parameters(), *module.named_buffers()]
        placed = tuple((n, getattr(x, "placements", None), x.ndim) for n, x in held)
        values = tuple(
            (path, type(part), name, value)
            for path, part in module.named_modules()
            for name, value in part.__dict__.items()
            if is_value(value)
        )
        return self._paths.get(id(module), ""), (placed, values)

    def problem(
        self,
        call: FunctionCall,
        calls: CallsBySite,
        arguments: CallArguments,
        indices: FixedIndices,
        module_calls: Mapping[str, list[ModuleCall]],
        mesh: DeviceMesh,
    ) -> str:
        """Why the function may use a tensor in place of another one that is placed otherwise; "" if it does not.

        Args:
            calls: of torch functions.
        """
        source = source_of(call.code)
        for number in self._modes.get(call, ()):
            node = source.nodes[number] if source is not None else None
            assert isinstance(node, ast.Call)
            if not all(indices.is_fixed(call, part) for part in (*node.args, *(k.value for k in node.keywords))):
                return f"{call.code.co_filename}:{node.lineno}: a value may decide whether there are gradients here"
        for number, selection in self._found.get(call, {}).items():
            assert source is not None
            node = source.nodes[number]
            if selection.indices and all(indices.is_fixed(call, index) for index in selection.indices):
                continue
            if isinstance(node, ast.Call) and _is_recorded_itself(
                node, number, call, source, calls.get(call, {}), arguments
            ):
                continue
            computed = [record for part in selection.computed for record in _results_at(source, call, calls, part)]
            for path in selection.called:
                computed += [record for _, outputs in module_calls.get(path, ()) for record in outputs]
            if (
                selection.unknown
                or any(_differ([*found, *computed], mesh) for found in selection.tensors)
                or any(_modules_differ(found, module_calls, mesh) for found in selection.modules)
            ):
                line = getattr(node, "lineno", 0)
                return f"{call.code.co_filename}:{line}: a value may decide which of several tensors is used here"
        return ""


def _is_recorded_itself(
    node: ast.Call,
    number: int,
    call: FunctionCall,
    source: FunctionSource,
    calls: Mapping[tuple[int, int], list[Call]],
    arguments: CallArguments,
) -> bool:
    """Whether a call runs a torch function, or a function of the model's, and not one that calls it in turn."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for (part, offset), found in calls.items():
        if source.node_of[part].get(offset, -1) == number and name == getattr(found[0].function, "__name__", ""):
            return True
    return any(
        source.node_of[part].get(offset, -1) == number and arguments.calls_itself(node, code)
        for part, offset, code in call.called
    )


def _results_at(source: FunctionSource, call: FunctionCall, calls: CallsBySite, node: int) -> list[TensorRecord]:
    """What torch functions returned that were called at a node, or by functions that were called there."""

    def is_there(part: int, offset: int) -> bool:
        return source.node_of[part].get(offset, -1) == node

    found = [one for place, made in calls.get(call, {}).items() if is_there(*place) for one in made]
    for (part, offset, _), called in call.called.items():
        if is_there(part, offset):
            for below in called.all_below():
                found += itertools.chain.from_iterable(calls.get(below, {}).values())
    return [record for one in found for record in one.outputs]


def _differ(records: Sequence[TensorRecord], mesh: DeviceMesh) -> bool:
    """Whether something else happens to one than to another."""
    kinds = [types_of([record], mesh) for record in records]
    ones = {tuple(size == 1 for size in record.shape) for record in records}
    return bool(records) and (merged_types(kinds) is None or len(ones) > 1)


def _modules_differ(modules: Sequence[_Module], module_calls: Mapping[str, list[ModuleCall]], mesh: DeviceMesh) -> bool:
    """One that has not run is refused when it is called."""
    calls = [call for path, _ in modules for call in module_calls.get(path, ())]
    are_alike = (
        all(merged_types([types_of(call[i], mesh) for call in calls]) is not None for i in (0, 1)) if calls else True
    )
    placed, values = {held[0] for _, held in modules}, {held[1] for path, held in modules if path}
    return not are_alike or len(placed) > 1 or len(values) > 1
