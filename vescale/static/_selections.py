"""``Selections``: what a recorded forward chose tensors from by values that no guard compares, and without a branch."""

from __future__ import annotations

import ast
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.compat import no_torch_function
from vescale.static._call_tree import FunctionCall
from vescale.static._fixed_arguments import CallArguments
from vescale.static._fixed_indices import FixedIndices
from vescale.static._frame_values import FrameValues
from vescale.static._held_values import is_value
from vescale.static._record import Call, ModuleCall, TensorRecord
from vescale.static._selection_points import parents_of
from vescale.static._source import FunctionSource, source_of
from vescale.static._tensor_type import merged_types, types_of

__all__ = ["Selections"]


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
