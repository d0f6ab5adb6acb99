"""From a recorded step to what a static forward of it changes in each function."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vescale.static._branches import untaken_branches
from vescale.static._call_tree import FunctionCall
from vescale.static._local_run import LocalRun
from vescale.static._patch import Patch, can_be_site
from vescale.static._record import Call, Recorder, TensorRecord
from vescale.static._size_functions import SIZE_READERS, SIZE_TAKERS
from vescale.static._source import FunctionSource, source_of
from vescale.static._tensor_type import TensorType, type_of

__all__ = ["Eager", "FunctionPlan", "ModulePlan", "Problem", "ReadSizes", "TakeSizes", "analyze"]


@dataclass(frozen=True)
class ReadSizes:
    """A function that reads sizes of a tensor, of which the model sees the global ones."""

    function: Any
    factors: tuple[int, ...]


@dataclass(frozen=True)
class TakeSizes:
    """A function that takes the global sizes of its result."""

    factors: tuple[int, ...]


@dataclass(frozen=True)
class Eager:
    """A function that runs on DTensors; ``reason``: why."""

    function: Any
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    reason: str = field(compare=False)


@dataclass(frozen=True)
class Problem:
    """What cannot be done at a call site; its module runs in eager mode."""

    reason: str


@dataclass(eq=False)
class FunctionPlan:
    """What is changed in a function; nodes are numbers of ``source.nodes``.

    Attributes:
        calls_torch: whether torch functions ran in it, or in functions that it called.
    """

    call: FunctionCall
    source: FunctionSource
    patch: Patch
    actions: dict[int, ReadSizes | TakeSizes | Eager]
    swaps: dict[int, FunctionPlan]
    calls_torch: bool = True


@dataclass(eq=False)
class ModulePlan:
    """What becomes of a module's forward.

    Attributes:
        problem: why it runs in eager mode; "" if it does not.
        forward: None where nothing changes.
    """

    path: str
    problem: str = ""
    forward: FunctionPlan | None = None


def analyze(recorder: Recorder, mesh: DeviceMesh) -> dict[str, ModulePlan]:
    """By module path, for each module whose forward ran."""
    _complete_parameters(recorder)
    by_call: dict[FunctionCall, dict[tuple[int, int], list[Call]]] = {}
    problems = dict(recorder.problems)
    for call in recorder.calls:
        if call.site is None:
            if not _is_plain(call):
                problems.setdefault("", f"{_name(call.function)} runs outside of recorded functions")
            continue
        function, part, offset = call.site
        by_call.setdefault(function, {}).setdefault((part, offset), []).append(call)
    plans = {}
    for path, forward in recorder.tree.forwards.items():
        problem = problems.get(path, "")
        plan: FunctionPlan | Problem | None = None
        if not problem:
            plan = _plan(forward, by_call, mesh)
            if isinstance(plan, Problem):
                problem, plan = plan.reason, None
        plans[path] = ModulePlan(path, problem, plan)
    return plans


def _complete_parameters(recorder: Recorder) -> None:
    """Gradients of parameters are what their uses send."""
    for record in _uses(recorder):
        if record.value is not None and record.value.is_parameter:
            record.value.grads |= record.grads
    for value in recorder.named.values():
        if len(value.grads) > 1:
            value.grads = {min(value.grads, key=str)}


def _uses(recorder: Recorder) -> list[TensorRecord]:
    uses = [record for call in recorder.calls for record in call.inputs]
    return uses + [boundary.input for calls in recorder.boundaries.values() for found in calls for boundary in found]


def _plan(
    call: FunctionCall, by_call: dict[FunctionCall, dict[tuple[int, int], list[Call]]], mesh: DeviceMesh
) -> FunctionPlan | Problem | None:
    """None where nothing changes."""
    source = source_of(call.code)
    where = f"{call.code.co_filename}:{call.code.co_firstlineno}"
    actions: dict[int, ReadSizes | TakeSizes | Eager] = {}
    seen: dict[int, list[Call]] = {}
    for (part, offset), calls in by_call.get(call, {}).items():
        node = -1 if source is None else source.node_of[part].get(offset, -1)
        seen.setdefault(node, []).extend(calls)
    for node, calls in seen.items():
        found = {action for one in calls if (action := _action(one, mesh)) is not None}
        if not found:
            continue
        line = f"{call.code.co_filename}:{_line(source, node)}"
        if len(found) > 1 or len({one.function for one in calls}) > 1 or any(_is_plain(one) for one in calls):
            return Problem(f"{line}: {_name(calls[0].function)} is called in several ways {set([(_name(o.function), _why_not_plain(o)) for o in calls])}")
        (action,) = found
        if isinstance(action, Problem):
            return Problem(f"{line}: {action.reason}")
        if source is None or node < 0 or not can_be_site(source.nodes[node]) or not calls[0].is_direct:
            return Problem(f"{line}: {_name(calls[0].function)} cannot be reached from the source ({getattr(action, 'reason', action)})")
        actions[node] = action
    swaps: dict[int, FunctionPlan] = {}
    for (part, offset, _), called in call.called.items():
        node = -1 if source is None else source.node_of[part].get(offset, -1)
        is_reached = node >= 0 and source is not None and isinstance(source.nodes[node], ast.Call) and called.is_direct
        inner = _plan(called, by_call, mesh)
        calls_torch = any(one in by_call for one in called.all_below())
        if not is_reached and not calls_torch:
            continue  # a constructor, or an attribute of a configuration: what it returns decides branches of its caller
        if isinstance(inner, Problem):
            return inner
        if inner is None:
            continue
        name = called.code.co_name
        if not is_reached:
            return Problem(f"{where}: {name} cannot be reached from the source of its caller")
        if node in swaps or node in actions:
            return Problem(f"{where}: several functions are called at one place ({name})")
        inner.calls_torch = calls_torch
        swaps[node] = inner
    if source is None:
        return Problem(f"{where}: the source of {call.code.co_name} is not known")
    refused, refused_else = untaken_branches(call, source)
    patch = Patch(tuple(sorted(actions)), tuple(sorted(swaps)), refused, refused_else)
    return FunctionPlan(call, source, patch, actions, swaps) if patch else None


def _line(source: FunctionSource | None, node: int) -> int:
    return 0 if source is None or node < 0 else getattr(source.nodes[node], "lineno", 0)


def _name(function: Any) -> str:
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    name = getattr(function, "__name__", str(function))
    return f"{owner}.{name}" if name == "__get__" else name


def _is_plain(call: Call) -> bool:
    return not _why_not_plain(call)


def _why_not_plain(call: Call) -> str:
    """Why the function may not simply run on the local tensors; "" if it may."""
    if call.changed:
        return call.changed
    if call.local_run is not LocalRun.SAME:
        return f"on the local tensors, it returns {call.local_run.value}"
    if call.moves_gradients and not _is_replicated(call):
        return "its backward moves tensors"
    for record in call.inputs:
        if record.value is not None and record.grads and record.grads != record.value.grads:
            return f"its gradient is {record.grads}, and that of the tensor {record.value.grads}"
    return ""


def _is_replicated(call: Call) -> bool:
    """Whether tensors and gradients are whole on every rank, so that no backward of the function can move any."""
    records = [record for record in (*call.inputs, *call.outputs) if record.value is not None]
    found = [record.placements for record in records] + [p for r in records if r.value for p in r.value.grads | r.grads]
    return all(p.is_replicate() for placements in found if placements is not None for p in placements)


def _action(call: Call, mesh: DeviceMesh) -> ReadSizes | TakeSizes | Eager | Problem | None:
    reason = _why_not_plain(call)
    if not reason:
        return None
    for record in (*call.inputs, *call.outputs):
        if record.value is not None and len(record.value.grads) > 1:
            return Problem(f"a gradient arrives in several placements: {record.value.grads}")
    inputs = tuple(_types(call.inputs, mesh))
    outputs = tuple(_types(call.outputs, mesh))
    if not call.changed and call.function in SIZE_READERS and call.local_run is LocalRun.SIZES and inputs[0].is_even:
        return ReadSizes(call.function, inputs[0].factors)
    if call.function in SIZE_TAKERS and call.local_run is LocalRun.TAKES_SIZES and outputs[0].is_even:
        if not call.moves_gradients and all(r.value is None or not r.grads or r.grads == r.value.grads for r in call.inputs):
            return TakeSizes(outputs[0].factors)
    if "writes in place" in call.changed:
        return Problem(f"{_name(call.function)} {call.changed}")
    return Eager(call.function, inputs, outputs, reason)


def _types(records: Sequence[TensorRecord], mesh: DeviceMesh) -> list[TensorType]:
    return [type_of(record, mesh, record.value.grads if record.value is not None else ()) for record in records]
