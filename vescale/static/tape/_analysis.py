"""What becomes of the modules of a recorded step, and of each call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from vescale.static._actions import Action, Problem, action_of
from vescale.static._analysis import ModulePlan, side_channel
from vescale.static._gradients import settle_gradients
from vescale.static._recorded import Recorded
from vescale.static._state import is_inside
from vescale.static._step_records import Call
from vescale.static._tensor_type import types_of
from vescale.static.tape._recorder import CallEvent, Event, ModuleEvent, TapeRecorder


@dataclass(frozen=True)
class RecordedTape:
    """A recorded step.

    Attributes:
        recorded: as of other static forwards.
        events: those that a static forward repeats, in order.
        actions: what is done in place of a call; the others run on the local tensors.
        names: numbers of parameters and buffers, by name.
    """

    recorded: Recorded
    events: tuple[Event, ...]
    actions: Mapping[Call, Action]
    names: Mapping[str, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_values: int


def recorded_tape(recorder: TapeRecorder, mesh: DeviceMesh) -> RecordedTape:
    """What a recorder has seen."""
    problems = {**settle_gradients(recorder, mesh), **recorder.problems}
    actions: dict[Call, Action] = {}
    ran = dict.fromkeys(["", *recorder.module_calls])
    for event in recorder.events:
        if not isinstance(event, CallEvent) or any(is_inside(event.module, region) for region in recorder.regions):
            continue
        action = action_of(event.call, mesh)
        if isinstance(action, Problem):
            problems.setdefault(event.module, action.reason)
        elif action is not None:
            actions[event.call] = action
    plans = {path: ModulePlan(path) for path in ran}
    for path, reason in problems.items():
        while path not in plans:  # of a module whose call was not seen
            path = path.rpartition(".")[0]
        plans[path] = ModulePlan(path, reason)
    while leak := side_channel(
        recorder, [path for path, plan in plans.items() if plan.problem or path in recorder.regions]
    ):
        plans[leak[0]] = ModulePlan(*leak)
    aside = frozenset(path for path, plan in plans.items() if path and (plan.problem or path in recorder.regions))
    events = tuple(recorder.events_outside(aside))
    types = {
        event.path: (types_of(event.inputs, mesh), types_of(event.outputs, mesh))
        for event in events
        if isinstance(event, ModuleEvent)
    }
    grads = {name: next(iter(value.grads)) for name, value in recorder.named.items() if value.grads}
    calls = [event.call for event in events if isinstance(event, CallEvent)]
    recorded = Recorded(
        plans,
        types,
        types_of(recorder.inputs, mesh),
        types_of(recorder.outputs, mesh),
        types_of(recorder.hidden, mesh),
        grads,
        {},
        any(call.is_random for call in calls),
        recorder.recomputes,
    )
    names = {name: recorder.numbers[value] for name, value in recorder.named.items() if value in recorder.numbers}
    return RecordedTape(
        recorded,
        events,
        actions,
        names,
        tuple(recorder.input_numbers),
        tuple(recorder.output_numbers),
        recorder.num_values,
    )
