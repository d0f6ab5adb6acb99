"""``program``: what a model in static mode runs, as a value."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

from torch import nn

from vescale.errors import StaticRecordError
from vescale.plans import MeshAxes
from vescale.static._actions import Checked, Eager, ReadSizes, TakeSizes
from vescale.static._analysis import FunctionPlan
from vescale.static._fingerprint import code_digest, globals_digest, state_digest
from vescale.static._forward import StaticForward
from vescale.static._function_names import function_name
from vescale.static._install import static_forward
from vescale.static._program import StaticProgram
from vescale.static._record_loading import VERSIONS
from vescale.static._record_values import (
    RecordedBoundary,
    RecordedFunction,
    RecordedModule,
    RecordedPatch,
    RecordedSite,
    RecordedStep,
    RecordedType,
)
from vescale.static._recorded_program import RecordedProgram
from vescale.static._tensor_type import TensorType
from vescale.static.tape import TapeProgram

_ORDER = {"redistribute": 0, "check": 1}  # in which a record has sites; others follow


def program(model: nn.Module) -> RecordedProgram:
    """What a model in static mode runs: types, places in its code, communication; for reading, and for
    ``parallelize(mode="static", record=...)`` in another process. No communication.

    A step has to have been recorded, with its backward. The value holds for all ranks, except where ranks share sizes
    unevenly: then it is this rank's.

    Raises KeyError for a model that is not in static mode, and StaticRecordError where no step has been recorded, where the
    model has changed since, and for functions that have no name.

    Args:
        model: what :func:`~vescale.parallelize` returned.
    """
    forward = static_forward(model)
    forward.finish()
    steps, problem = [], "no step of the model has been recorded; run one, with its backward"
    for key, found in forward.programs.items():
        if isinstance(found, TapeProgram):
            problem = "a step that is compared call by call has no sites in functions, and cannot be written"
            continue
        broken = found.guards.broken()
        if broken:
            problem = f"{broken} since it was recorded; run two steps more, and ask again"
        else:
            steps.append(found.recorded.step or _step(forward, found, model, key))
    steps += forward.waiting_steps()
    if not steps:
        raise StaticRecordError(problem)
    runtime = forward.runtime
    return RecordedProgram(
        MeshAxes.of(runtime.mesh), runtime.mesh.device_type, runtime.program.digest(), VERSIONS, tuple(steps)
    )


def _step(forward: StaticForward, found: StaticProgram, model: nn.Module, call: str) -> RecordedStep:
    recorded = found.recorded
    functions = {code: _function(code, held) for code, held in recorded.functions.items()}
    boundaries: dict[str, list[RecordedBoundary]] = {}
    for (path, name), placed in recorded.boundaries.items():
        types = tuple((_type(one.before), _type(one.after)) for one in placed)
        communication = tuple(text for one in placed for text in one.communication)
        boundaries.setdefault(path, []).append(RecordedBoundary(name, types, communication))
    modules = []
    for path, module in model.named_modules():
        plan = recorded.plans.get(path)
        state = state_digest(module, found.units.parameters)
        if plan is None:
            modules.append(RecordedModule(path, state, ran=False))
            continue
        outside = recorded.module_types.get(path)
        around = [] if outside is not None else boundaries.get(path, [])
        modules.append(
            RecordedModule(
                path,
                state,
                True,
                plan.problem,
                None if plan.forward is None else _patch(plan.forward, functions),
                None if outside is None else _types(outside[0]),
                None if outside is None else _types(outside[1]),
                tuple(around),
            )
        )
    step = RecordedStep(
        call,
        recorded.draws,
        recorded.recomputes,
        _types(recorded.inputs),
        _types(recorded.outputs),
        _types(recorded.hidden),
        tuple(sorted(recorded.grads.items(), key=lambda item: str(item[1]))),
        tuple(dict.fromkeys(functions.values())),
        tuple(modules),
        path=recorded.path,
    )
    if all(kind.is_even for kind in step.types()):
        return step
    coordinate = forward.runtime.mesh.get_coordinate()
    return RecordedStep(**{**vars(step), "coordinate": tuple(coordinate or ())})


def _patch(plan: FunctionPlan, functions: Mapping[CodeType, RecordedFunction]) -> RecordedPatch:
    sites = [_site(plan, node, action) for node, action in sorted(plan.actions.items())]
    calls = []
    for node, called in sorted(plan.swaps.items()):
        patches = ((functions[code], None if p is None else _patch(p, functions)) for code, p in called.items())
        calls.append((node, tuple(patches)))
    return RecordedPatch(
        functions[plan.code],
        tuple(sorted(sites, key=lambda site: _ORDER.get(site.action, len(_ORDER)))),
        tuple(calls),
        plan.patch.refused,
        plan.patch.refused_else,
        plan.patch.refused_false,
        plan.patch.refused_true,
        plan.patch.marked,
    )


def _site(plan: FunctionPlan, node: int, action: Any) -> RecordedSite:
    expression: Any = plan.source.nodes[node]
    where = node, expression.lineno, expression.col_offset + 1
    match action:
        case Eager():
            return RecordedSite(
                *where,
                "redistribute",
                function_name(action.function),
                _types(action.inputs),
                _types(action.outputs),
                (),
                action.reason,
                action.communication,
            )
        case Checked():
            types = _types(action.inputs), _types(action.outputs)
            return RecordedSite(*where, "check", function_name(action.function), *types)
        case ReadSizes():
            return RecordedSite(*where, "read_sizes", function_name(action.function), factors=action.factors)
        case TakeSizes():
            return RecordedSite(*where, "take_sizes", function_name(action.function), factors=action.factors)
    raise AssertionError(action)


def _function(code: CodeType, held: Mapping[str, Any]) -> RecordedFunction:
    return RecordedFunction(
        code.co_qualname,
        _shown(code.co_filename),
        code.co_firstlineno,
        code_digest(code),
        globals_digest(code, held),
    )


@functools.cache
def _shown(file: str) -> str:
    """A file without the folder that Python imports from."""
    folders = sorted((os.path.join(folder, "") for folder in sys.path if folder), key=len, reverse=True)
    return next((file.removeprefix(folder) for folder in folders if file.startswith(folder)), file)


def _types(kinds: Sequence[TensorType]) -> tuple[RecordedType, ...]:
    return tuple(map(_type, kinds))


def _type(kind: TensorType) -> RecordedType:
    return RecordedType(kind.placements, kind.grad, kind.factors, kind.sizes)
