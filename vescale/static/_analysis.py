"""From a recorded step to what a static forward of it changes in each function."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from torch.distributed.device_mesh import DeviceMesh

from vescale.static._actions import Action, Problem, ReadSizes, TakeSizes, action_of, is_plain, merged_action, name_of
from vescale.static._branches import untaken_branches
from vescale.static._call_tree import FunctionCall
from vescale.static._gradients import settle_gradients
from vescale.static._patch import Patch, can_be_site
from vescale.static._placing import placed_tensors
from vescale.static._record import Call, ModuleCall, Recorder
from vescale.static._source import FunctionSource, source_of
from vescale.static._state import is_inside
from vescale.static._tensor_type import TensorType, merged_types, types_of

__all__ = ["FunctionPlan", "ModulePlan", "analyze", "module_types"]


@dataclass(eq=False)
class FunctionPlan:
    """What is changed in a function; nodes are numbers of ``source.nodes``.

    Attributes:
        swaps: of the functions called at a node, by their code; None: the function runs as it is.
        has_sites: whether functions are changed in it, or in functions that it calls.
    """

    call: FunctionCall
    source: FunctionSource
    patch: Patch
    actions: dict[int, Action]
    swaps: Mapping[int, Mapping[CodeType, FunctionPlan | None]]
    has_sites: bool

    @functools.cached_property
    def runs_on_dtensors(self) -> bool:
        """Whether a changed function may run on DTensors, here or in functions that it calls."""
        if not all(isinstance(action, ReadSizes | TakeSizes) for action in self.actions.values()):
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


def analyze(recorder: Recorder, mesh: DeviceMesh, unreached: list[FunctionCall]) -> dict[str, ModulePlan]:
    """By module path, for each module whose forward ran. ``unreached`` gets the functions of static modules that no call in
    the source reaches, and that called no torch function."""
    settle_gradients(recorder, mesh)
    by_call: dict[FunctionCall, dict[tuple[int, int], list[Call]]] = {}
    problems = dict(recorder.problems)
    for call in recorder.calls:
        if call.site is None:
            if not is_plain(call, mesh):
                problems.setdefault("", f"{name_of(call.function)} runs outside of recorded functions")
            continue
        function, part, offset = call.site
        by_call.setdefault(function, {}).setdefault((part, offset), []).append(call)
    for one, other in recorder.layers.functions(recorder.tree):
        if one in by_call:
            by_call[other] = by_call[one]
    for placing, placed in recorder.boundaries.items():
        path = placing.instruction.path
        if path not in recorder.regions and placed_tensors(placed, mesh) is None:
            problems.setdefault(path, "the plan places its inputs or outputs in several ways")
    plans: dict[str, ModulePlan] = {}
    for path in recorder.module_calls:
        if path not in recorder.tree.forwards:
            is_region = path in recorder.regions
            problem = problems.get(path, "" if is_region else "its forward is not a Python function of the model's")
            plans[path] = ModulePlan(path, problem)
    for path, forward in recorder.tree.forwards.items():
        if any(is_inside(path, region) for region in recorder.regions):
            plans[path] = ModulePlan(path)  # its own code runs on local tensors in eager mode, too
            continue
        problem = problems.get(path, "")
        found_there: list[FunctionCall] = []
        plan = _plan(forward, by_call, mesh, found_there) if not problem else Problem(problem)
        if isinstance(plan, Problem):
            plans[path] = ModulePlan(path, plan.reason)
        else:
            plans[path] = ModulePlan(path, forward=plan)
            unreached += found_there
    for path, found in plans.items():
        if path and not found.problem and path not in recorder.regions:
            continue
        if path and module_types(recorder.module_calls[path], mesh) is None:
            why = found.problem or "runs on local tensors by the plan"
            plans[""] = ModulePlan("", f"{path} is called in several ways, and {why}")
    return plans


def module_types(calls: Sequence[ModuleCall], mesh: DeviceMesh) -> tuple[tuple[TensorType, ...], ...] | None:
    """Types of the inputs and outputs of a module; None if its calls differ."""
    inputs, outputs = (merged_types([types_of(call[i], mesh) for call in calls]) for i in (0, 1))
    return None if inputs is None or outputs is None else (inputs, outputs)


def _plan(
    call: FunctionCall,
    by_call: dict[FunctionCall, dict[tuple[int, int], list[Call]]],
    mesh: DeviceMesh,
    unreached: list[FunctionCall],
) -> FunctionPlan | Problem | None:
    """None where nothing changes."""
    source = source_of(call.code)
    where = f"{call.code.co_filename}:{call.code.co_firstlineno}"
    actions: dict[int, Action] = {}
    seen: dict[int, list[Call]] = {}
    for (part, offset), calls in by_call.get(call, {}).items():
        node = -1 if source is None else source.node_of[part].get(offset, -1)
        seen.setdefault(node, []).extend(calls)
    for node, calls in seen.items():
        found = {action for one in calls if (action := action_of(one, mesh)) is not None}
        if not found:
            continue
        line = f"{call.code.co_filename}:{_line(source, node)}"
        action = merged_action(found)
        is_one = len({one.function for one in calls}) == 1 and not any(is_plain(one, mesh) for one in calls)
        if action is None or not is_one:
            return Problem(f"{line}: {name_of(calls[0].function)} is called in several ways")
        if isinstance(action, Problem):
            return Problem(f"{line}: {action.reason}")
        if source is None or node < 0 or not can_be_site(source.nodes[node], source.nodes) or not calls[0].is_direct:
            return Problem(f"{line}: {name_of(calls[0].function)} cannot be reached from the source")
        actions[node] = action
    swaps: dict[int, dict[CodeType, FunctionPlan | None]] = {}
    for (part, offset, _), called in call.called.items():
        node = -1 if source is None else source.node_of[part].get(offset, -1)
        is_reached = node >= 0 and source is not None and isinstance(source.nodes[node], ast.Call) and called.is_direct
        inner = _plan(called, by_call, mesh, unreached)
        calls_torch = any(one in by_call for one in called.all_below())
        if not is_reached and not calls_torch:
            unreached += called.all_below()
            continue  # a constructor, or an attribute of a configuration: what it returns decides branches of its caller
        if isinstance(inner, Problem):
            return inner
        name = called.code.co_name
        if not is_reached:
            if inner is None:
                continue
            return Problem(f"{where}: {name} cannot be reached from the source of its caller")
        swaps.setdefault(node, {})[called.code] = inner
    swaps = {node: plans for node, plans in swaps.items() if any(plans.values())}
    for node, plans in swaps.items():
        if node in actions:
            names = ", ".join(code.co_name for code in plans)
            return Problem(f"{where}: {names} and a torch function are called at one place")
    if source is None:
        calls_torch = any(one in by_call for one in call.all_below())
        return Problem(f"{where}: the source of {call.code.co_name} is not known") if calls_torch else None
    patch = replace(untaken_branches(call, source), sites=tuple(sorted(actions)), swaps=tuple(sorted(swaps)))
    called_plans = [plan for plans in swaps.values() for plan in plans.values() if plan is not None]
    has_sites = bool(actions) or any(plan.has_sites for plan in called_plans)
    return FunctionPlan(call, source, patch, actions, swaps, has_sites) if patch else None


def _line(source: FunctionSource | None, node: int) -> int:
    return 0 if source is None or node < 0 else getattr(source.nodes[node], "lineno", 0)
