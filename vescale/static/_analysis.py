"""From a recorded step to what a static forward of it changes in each function."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from torch.distributed.device_mesh import DeviceMesh

from vescale.runtime import Placing
from vescale.static._actions import (
    Action,
    Checked,
    Problem,
    ReadSizes,
    TakeSizes,
    action_of,
    checked_action,
    is_plain,
    merged_action,
    name_of,
)
from vescale.static._branches import both_ways, untaken_branches
from vescale.static._call_tree import FunctionCall, is_of_torch
from vescale.static._decisions import decisions_of, first_instruction
from vescale.static._fixed_arguments import CallArguments
from vescale.static._fixed_indices import FixedIndices
from vescale.static._gradients import settle_gradients
from vescale.static._patch import Patch, can_be_site, mark_of
from vescale.static._placing import PlacedTensor, placed_tensors
from vescale.static._record import Recorder
from vescale.static._source import FunctionSource, source_of
from vescale.static._state import is_inside
from vescale.static._step_records import Call, ModuleCall, TensorRecord, Value
from vescale.static._tensor_type import TensorType, merged_types, types_of

# Tensors that modules in eager mode share with others otherwise than as arguments and results, such as attributes.


def side_channel(recorder: Recorder, eager: Collection[str]) -> tuple[str, str] | None:
    """The first tensor that is a DTensor for a module in eager mode, and a local tensor for one that is not.

    Args:
        eager: paths of the modules in eager mode.

    Returns:
        The path of the innermost module that contains both, and the reason why it cannot be static.
    """
    if not eager or "" in eager:
        return None
    eager = [path for path in eager if not any(path != outer and is_inside(path, outer) for outer in eager)]
    passed = {path: _values_of_module(recorder, path) for path in eager}
    around = functools.cache(lambda path: frozenset(outer for outer in eager if is_inside(path, outer)))
    made = {record.value: "" for record in recorder.inputs if record.value is not None}
    for path, inputs, outputs in _uses(recorder):
        for value in filter(None, (record.value for record in inputs)):
            maker = made.get(value)  # of views for units, and of what entries of the plan place, it is not known
            if value.name in recorder.written_names:
                maker = value.name.rpartition(".")[0]
            crossed = () if maker is None else around(path) ^ around(maker)
            outer = next((outer for outer in crossed if value not in passed[outer]), None)
            if maker is not None and outer is not None:
                places = f"{path or 'the model'} uses a tensor of {maker or 'the model'}"
                reason = f"{places}, which is no argument or result of {outer}, a module in eager mode"
                return _common(recorder, path, maker), reason
        for value in filter(None, (record.value for record in outputs)):
            made.setdefault(value, path)
    return None


def _uses(recorder: Recorder) -> Iterator[tuple[str, list[TensorRecord], list[TensorRecord]]]:
    for call in recorder.calls:
        if call.site is not None:
            yield call.site[0].module, call.inputs, call.outputs


def _values_of_module(recorder: Recorder, path: str) -> set[Value]:
    """What it gets and returns, also as its entries of the plan place it."""
    records = [record for call in recorder.module_calls.get(path, ()) for part in call for record in part]
    for placing, calls in recorder.boundaries.items():
        if placing.instruction.path == path:
            records += [record for placed in calls for one in placed for record in (one.input, one.output)]
    return {record.value for record in records if record.value is not None}


def _common(recorder: Recorder, first: str, second: str) -> str:
    """The innermost module that has run and contains both."""
    common = first
    while common and not (is_inside(second, common) and common in recorder.module_calls):
        common = common.rpartition(".")[0]
    return common


_CallsBySite = dict[FunctionCall, dict[tuple[int, int], list[Call]]]


@dataclass(eq=False)
class FunctionPlan:
    """What is changed in a function; nodes are numbers of ``source.nodes``.

    Attributes:
        code: of the function itself; ``source.code`` may be an equal one.
        swaps: of the functions called at a node, by their code; None: the function runs as it is.
        has_sites: whether functions are changed in it, or in functions that it calls.
    """

    code: CodeType
    source: FunctionSource
    patch: Patch
    actions: dict[int, Action]
    swaps: Mapping[int, Mapping[CodeType, FunctionPlan | None]]
    has_sites: bool

    @functools.cached_property
    def runs_on_dtensors(self) -> bool:
        """Whether a changed function may run on DTensors, here or in functions that it calls."""
        if not all(isinstance(action, ReadSizes | TakeSizes | Checked) for action in self.actions.values()):
            return True
        for plans in self.swaps.values():
            # Functions that are looked up when they are called are known by this alone.
            known: bool | None = getattr(plans, "has_sites", None)
            if known is None:
                known = any(plan is not None and plan.runs_on_dtensors for plan in plans.values())
            if known:
                return True
        return False


@dataclass(eq=False)
class ModulePlan:
    """What becomes of a module's forward.

    Attributes:
        problem: why it runs in eager mode; "" if it does not.
        forward: None where nothing changes, as in the regions of the plan that run on local tensors.
    """

    path: str
    problem: str = ""
    forward: FunctionPlan | None = None


@dataclass(frozen=True)
class Analysis:
    """What becomes of a recorded step.

    Attributes:
        plans: by module path, for each module whose forward ran.
        unreached: functions of static modules that no call in the source reaches, and that called no torch function.
        path: what functions tell of branches and loops in a static forward like this one.
        boundaries: the tensors that entries of the plan place; None for an entry whose calls differ.
    """

    plans: dict[str, ModulePlan]
    unreached: list[FunctionCall]
    path: tuple[int, ...]
    boundaries: Mapping[Placing, tuple[PlacedTensor, ...] | None]


def analyze(recorder: Recorder, mesh: DeviceMesh) -> Analysis:
    """Decide what a static forward does at each place."""
    unreached: list[FunctionCall] = []
    by_call: _CallsBySite = {}
    problems = {**settle_gradients(recorder, mesh), **recorder.problems}
    for call in recorder.calls:
        if call.site is None:
            if not is_plain(call, mesh):
                problems.setdefault("", f"{name_of(call.function)} runs outside of recorded functions")
            continue
        function, part, offset = call.site
        by_call.setdefault(function, {}).setdefault((part, offset), []).append(call)
    boundaries = {placing: placed_tensors(calls, mesh) for placing, calls in recorder.boundaries.items()}
    for placing, placed in boundaries.items():
        path = placing.instruction.path
        if path not in recorder.regions and placed is None:
            problems.setdefault(path, "the plan places its inputs or outputs in several ways")
    plans: dict[str, ModulePlan] = {}
    planner = _Planner(recorder, by_call, mesh)
    for path in recorder.module_calls:
        if path not in recorder.tree.forwards and path == recorder.layers.origin(path):
            is_region = path in recorder.regions
            problem = problems.get(path, "" if is_region else "its forward is not a Python function of the model's")
            plans[path] = ModulePlan(path, problem)
    for path, forward in recorder.tree.forwards.items():
        if any(is_inside(path, region) for region in recorder.regions):
            plans[path] = ModulePlan(path)  # its own code runs on local tensors in eager mode, too
            continue
        problem = problems.get(path, "")
        planner.unreached = []
        plan = planner.plan_forward(forward) if not problem else Problem(problem)
        if isinstance(plan, Problem):
            plans[path] = ModulePlan(path, plan.reason)
        else:
            plans[path] = ModulePlan(path, forward=plan)
            unreached += planner.unreached
    for path in recorder.module_calls:
        origin = recorder.layers.origin(path)
        if path != origin:
            problem = problems.get(path, plans[origin].problem)
            plans[path] = ModulePlan(path, problem, None if problem else plans[origin].forward)
    while leak := side_channel(
        recorder, [path for path, plan in plans.items() if plan.problem or path in recorder.regions]
    ):
        plans[leak[0]] = ModulePlan(*leak)
    for path, found in plans.items():
        if path and not found.problem and path not in recorder.regions:
            continue
        if path and module_types(recorder.module_calls[path], mesh) is None:
            why = found.problem or "runs on local tensors by the plan"
            plans[""] = ModulePlan("", f"{path} is called in several ways, and {why}")
    return Analysis(plans, unreached, tuple(_path(recorder, plans, planner.marked)), boundaries)


def _path(
    recorder: Recorder, plans: Mapping[str, ModulePlan], marked: Mapping[FunctionCall, frozenset[int]]
) -> Iterator[int]:
    eager = [path for path, plan in plans.items() if plan.problem or path in recorder.regions]
    is_eager = functools.cache(lambda module: any(is_inside(module, path) for path in eager))
    for call, nodes, module in recorder.tree.decided:
        found = marked.get(call)
        if found and not is_eager(module):
            yield from (mark_of(call.code, node) for node in nodes if node in found)


def module_types(calls: Sequence[ModuleCall], mesh: DeviceMesh) -> tuple[tuple[TensorType, ...], ...] | None:
    """Types of the inputs and outputs of a module; None if its calls differ."""
    inputs, outputs = (merged_types([types_of(call[i], mesh) for call in calls]) for i in (0, 1))
    return None if inputs is None or outputs is None else (inputs, outputs)


class _Planner:
    """Plans of functions.

    Attributes:
        unreached: functions that no call in the source reaches.
        marked: nodes of functions of which a static forward tells the order.
    """

    def __init__(self, recorder: Recorder, by_call: _CallsBySite, mesh: DeviceMesh) -> None:
        self._by_call, self._mesh = by_call, mesh
        self._globals = recorder.tree.functions
        self._open_names = recorder.changed_names.union(code.co_name for code in self._globals)
        self.unreached: list[FunctionCall] = []
        self.marked: dict[FunctionCall, frozenset[int]] = {}
        self._selections, self._module_calls = recorder.tree.selections, recorder.module_calls
        self._indices = FixedIndices(recorder.tree.functions, recorder.changed_names)

    def plan_forward(self, call: FunctionCall) -> FunctionPlan | Problem | None:
        """Of the forward of a module, with all functions that it calls."""
        return self._selected(call) or self.plan(call)

    def _selected(self, call: FunctionCall) -> Problem | None:
        """The first place, here or in functions that are called, where a value may decide which tensor is used."""
        for one in call.all_below():
            arguments = None if is_of_torch(one.code.co_filename) else self._arguments(one)
            if arguments is not None and self._selections is not None:
                problem = self._selections.problem(
                    one, self._by_call, arguments, self._indices, self._module_calls, self._mesh
                )
                if problem:
                    return Problem(problem)
        return None

    def _arguments(self, call: FunctionCall) -> CallArguments | None:
        source = source_of(call.code)
        return (
            None if source is None else CallArguments(call, source, self._globals.get(call.code, {}), self._open_names)
        )

    def plan(self, call: FunctionCall, is_reached: bool = True) -> FunctionPlan | Problem | None:
        """None where nothing changes; ``is_reached``: whether a caller can be changed to run another function."""
        source = source_of(call.code)
        where = f"{call.code.co_filename}:{call.code.co_firstlineno}"
        arguments = self._arguments(call)
        actions: dict[int, Action] = {}
        seen: dict[int, list[Call]] = {}
        for (part, offset), calls in self._by_call.get(call, {}).items():
            node = -1 if source is None else source.node_of[part].get(offset, -1)
            seen.setdefault(node, []).extend(calls)
        for node, calls in seen.items():
            action = self._action(calls)
            is_one = len({one.function for one in calls}) == 1
            takes_others = is_one and any(one.num_positional + one.num_keywords > one.num_values for one in calls)
            if action is None and source is not None and node >= 0 and (calls[0].is_direct or takes_others):
                site = source.nodes[node]
                if arguments is not None and arguments.may_differ(site, calls) and can_be_site(site, source.nodes):
                    action = checked_action(calls, self._mesh)
                    if action is not None and not (is_reached and calls[0].is_direct):
                        function = name_of(calls[0].function)
                        action = Problem(
                            f"{function} may get other arguments, in a function that its caller does not name"
                        )
            if action is None:
                continue
            line = f"{call.code.co_filename}:{_line(source, node)}"
            if isinstance(action, Problem):
                return Problem(f"{line}: {action.reason}")
            if (
                source is None
                or node < 0
                or not can_be_site(source.nodes[node], source.nodes)
                or not calls[0].is_direct
            ):
                return Problem(f"{line}: {name_of(calls[0].function)} cannot be reached from the source")
            actions[node] = action
        swaps: dict[int, dict[CodeType, FunctionPlan | None]] = {}
        for (part, offset, _), called in call.called.items():
            node = -1 if source is None else source.node_of[part].get(offset, -1)
            expression = None if source is None or node < 0 else source.nodes[node]
            is_call = isinstance(expression, ast.Call) and called.is_direct
            is_itself = is_call and arguments is not None and arguments.calls_itself(expression, called.code)
            inner = self.plan(called, is_reached and is_itself)
            calls_torch = any(one in self._by_call for one in called.all_below())
            if not is_call and not calls_torch:
                self.unreached += called.all_below()
                continue  # a constructor, or an attribute of a configuration: what it returns decides branches of its caller
            if isinstance(inner, Problem):
                return inner
            name = called.code.co_name
            if not is_call:
                if inner is None:
                    continue
                return Problem(f"{where}: {name} cannot be reached from the source of its caller")
            swaps.setdefault(node, {})[called.code] = inner
        swaps = {
            node: plans for node, plans in swaps.items() if any(plans.values()) or _is_open(source, node, arguments)
        }
        for node, plans in swaps.items():
            if node in actions:
                names = ", ".join(code.co_name for code in plans)
                return Problem(f"{where}: {names} and a torch function are called at one place")
        if source is None:
            calls_torch = any(one in self._by_call for one in call.all_below())
            return Problem(f"{where}: the source of {call.code.co_name} is not known") if calls_torch else None
        assert arguments is not None
        marked = self._marks(call, source, arguments) if is_reached else frozenset[int]()
        patch = replace(
            untaken_branches(call, source, self._globals),
            sites=tuple(sorted(actions)),
            swaps=tuple(sorted(swaps)),
            marked=tuple(sorted(marked)),
            wrapped=tuple(_wrapped(call, source, arguments)),
        )
        self.marked[call] = marked
        called_plans = [plan for plans in swaps.values() for plan in plans.values() if plan is not None]
        is_changed = any(not isinstance(action, Checked) for action in actions.values())
        has_sites = is_changed or any(plan.has_sites for plan in called_plans)
        return FunctionPlan(call.code, source, patch, actions, swaps, has_sites) if patch else None

    def _action(self, calls: Sequence[Call]) -> Action | Problem | None:
        """What the calls of one site have in common; None if they are those of the function on the local tensors."""
        found = {action for one in calls if (action := action_of(one, self._mesh)) is not None}
        if not found:
            return None
        action = merged_action(found)
        is_one = len({one.function for one in calls}) == 1 and not any(is_plain(one, self._mesh) for one in calls)
        if action is None or not is_one:
            return Problem(f"{name_of(calls[0].function)} is called in several ways")
        return action

    def _marks(self, call: FunctionCall, source: FunctionSource, arguments: CallArguments) -> frozenset[int]:
        """Nodes whose order decides which values meet where: of branches that were taken and not taken, and of loops whose
        rounds are not alike."""
        decisions = both_ways(call, source)
        for one in decisions_of(source):
            node = source.nodes[one.node]
            if not one.is_loop or arguments.is_fixed_loop(node):
                continue
            if getattr(node, "generators", None) or not self._has_equal_rounds(call, source, one.node):
                decisions.append(one)
        nodes = {number for one in decisions for number in (one.start, *one.arms) if number >= 0}
        return frozenset(number for number in nodes if first_instruction(source, number) in call.visits)

    def _has_equal_rounds(self, call: FunctionCall, source: FunctionSource, loop: int) -> bool:
        """Whether several rounds of a loop were recorded, in which each function got tensors of the same types."""
        numbers = source.numbers
        inside = {numbers[id(node)] for node in ast.walk(source.nodes[loop])}

        def is_inside(part: int, offset: int) -> bool:
            return source.node_of[part].get(offset, -1) in inside

        sites = [calls for place, calls in self._by_call.get(call, {}).items() if is_inside(*place)]
        for (part, offset, _), called in call.called.items():
            if is_inside(part, offset):
                sites += [calls for one in called.all_below() for calls in self._by_call.get(one, {}).values()]
        return bool(sites) and all(
            len(calls) > 1
            and all(
                merged_types([types_of(getattr(one, kind), self._mesh) for one in calls]) is not None
                for kind in ("inputs", "outputs")
            )
            for calls in sites
        )


def _wrapped(call: FunctionCall, source: FunctionSource, arguments: CallArguments) -> Iterator[int]:
    """``with`` statements that ran, of which the end of the body may be left out."""
    for number, node in enumerate(source.nodes):
        place = first_instruction(source, number)
        if isinstance(node, ast.With) and place is not None and call.visits[place] and arguments.may_suppress(node):
            yield number


def _is_open(source: FunctionSource | None, node: int, arguments: CallArguments | None) -> bool:
    """Whether another step may call other functions of the model at a place."""
    if source is None or arguments is None:
        return False
    expression = source.nodes[node]
    return isinstance(expression, ast.Call) and not arguments.has_fixed_function(expression)


def _line(source: FunctionSource | None, node: int) -> int:
    return 0 if source is None or node < 0 else getattr(source.nodes[node], "lineno", 0)
