"""``Recorded``: what a static forward is made from; of a step that was recorded in this process, or of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from vescale.static._analysis import ModulePlan, analyze, module_types
from vescale.static._placing import PlacedTensor
from vescale.static._record import Recorder
from vescale.static._record_values import RecordedStep
from vescale.static._step_records import Placements
from vescale.static._tensor_type import TensorType, types_of
from vescale.static._unreached import UnreachedFunctions

BoundaryName = tuple[str, str]  # path of an instruction, and the rest of its text

_Types = tuple[TensorType, ...]


@dataclass(frozen=True)
class Recorded:
    """A recorded step.

    Attributes:
        plans: of the modules that ran, by path.
        module_types: types of the inputs and outputs of modules that run in eager mode, and of regions, by path.
        inputs, outputs: of the model; ``hidden``: those inside of objects in its output.
        grads: placements of the gradients of parameters and buffers, by name; a name without a gradient is missing.
        boundaries: the tensors that entries of the plan place.
        draws: whether the step drew random numbers.
        recomputes: whether parts of it run again in backward.
        functions: all Python functions that ran, with their globals; empty if it comes from a file.
        step: what it comes from, if that is a file.
        path: what marked nodes tell, in order.
        has_repeats: whether layers are in it that were not recorded, because they did the same as another.
        unreached: functions that no call in the source reaches.
    """

    plans: Mapping[str, ModulePlan]
    module_types: Mapping[str, tuple[_Types, _Types]]
    inputs: _Types
    outputs: _Types
    hidden: _Types
    grads: Mapping[str, Placements]
    boundaries: Mapping[BoundaryName, tuple[PlacedTensor, ...]]
    draws: bool
    recomputes: bool
    functions: Mapping[CodeType, dict[str, Any]] = field(default_factory=dict)
    step: RecordedStep | None = None
    path: tuple[int, ...] = ()
    has_repeats: bool = False
    unreached: UnreachedFunctions = field(default_factory=UnreachedFunctions)


def recorded(recorder: Recorder, mesh: DeviceMesh) -> Recorded:
    """What a recorder has seen."""
    analysis = analyze(recorder, mesh)
    plans = analysis.plans
    types = {}
    for path, plan in plans.items():
        is_outside = path and (plan.problem or path in recorder.regions)
        found = module_types(recorder.module_calls[path], mesh) if is_outside else None
        if found is not None:
            types[path] = (found[0], found[1])
    grads = {name: next(iter(value.grads)) for name, value in recorder.named.items() if value.grads}
    boundaries = {placing.name: placed or () for placing, placed in analysis.boundaries.items()}
    for name, placements in list(grads.items()):
        grads.update((other, placements) for other in recorder.layers.counterparts(name) if other not in grads)
    for (path, text), placed in list(boundaries.items()):
        boundaries.update(((other, text), placed) for other in recorder.layers.counterparts(path))
    return Recorded(
        plans,
        types,
        types_of(recorder.inputs, mesh),
        types_of(recorder.outputs, mesh),
        types_of(recorder.hidden, mesh),
        grads,
        boundaries,
        any(call.is_random for call in recorder.calls),
        recorder.recomputes,
        recorder.tree.functions,
        path=analysis.path,
        has_repeats=bool(recorder.layers.repeats),
        unreached=UnreachedFunctions(
            analysis.unreached,
            (c for f in recorder.tree.forwards.values() for c in f.all_below()),
            recorder.tree.functions,
        ),
    )
