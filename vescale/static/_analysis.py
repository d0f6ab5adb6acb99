"""From a recorded step to what becomes of its modules, and of each call."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from vescale.static._actions import Action, Problem, action_of
from vescale.static._gradients import settle_gradients
from vescale.static._record import CallEvent, Event, Recorder
from vescale.static._state import is_inside
from vescale.static._step_records import Call, Placements, TensorRecord, Value
from vescale.static._tensor_type import TensorType, types_of

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
        yield call.module, call.inputs, call.outputs


def _values_of_module(recorder: Recorder, path: str) -> set[Value]:
    """What it gets and returns, also as its entries of the plan place it."""
    records = [record for call in recorder.module_calls.get(path, ()) for part in call for record in part]
    for one in recorder.boundaries:
        if one.placing.instruction.path == path:
            records += [one.input, one.output]
    return {record.value for record in records if record.value is not None}


def _common(recorder: Recorder, first: str, second: str) -> str:
    """The innermost module that has run and contains both."""
    common = first
    while common and not (is_inside(second, common) and common in recorder.module_calls):
        common = common.rpartition(".")[0]
    return common


@dataclass(frozen=True)
class RecordedTape:
    """A recorded step.

    Attributes:
        problems: of the modules that ran, why they run in eager mode, by path; "" if they do not.
        regions: paths of those that run on local tensors by the plan.
        events: those that a static forward repeats, in order.
        actions: what is done in place of a call; the others run on the local tensors.
        inputs, outputs: types of the model's tensors; ``hidden``: of those inside objects in its output.
        grads: placements of the gradients of parameters and buffers, by name; a name without a gradient is missing.
        draws: whether the step drew random numbers.
        names: numbers of parameters and buffers, by name.
        input_numbers, output_numbers: of the model's tensors; ``plain``: of those that are no DTensors.
    """

    problems: Mapping[str, str]
    regions: frozenset[str]
    events: tuple[Event, ...]
    actions: Mapping[Call, Action]
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    hidden: tuple[TensorType, ...]
    grads: Mapping[str, Placements]
    draws: bool
    names: Mapping[str, int]
    input_numbers: tuple[int, ...]
    output_numbers: tuple[int, ...]
    plain: frozenset[int]
    num_values: int


def recorded_tape(recorder: Recorder, mesh: DeviceMesh) -> RecordedTape:
    """What a recorder has seen."""
    found = {**settle_gradients(recorder, mesh), **recorder.problems}
    actions: dict[Call, Action] = {}
    for event in recorder.events:
        if not isinstance(event, CallEvent) or any(is_inside(event.module, region) for region in recorder.regions):
            continue
        action = action_of(event.call, mesh)
        if isinstance(action, Problem):
            place = "{}:{}: ".format(*event.call.place) if event.call.place[0] else ""
            found.setdefault(event.module, f"{place}{action.reason}")
        elif action is not None:
            actions[event.call] = action
    problems = dict.fromkeys(["", *recorder.module_calls], "")
    for path, reason in found.items():
        while path not in problems:  # of a module whose call was not seen
            path = path.rpartition(".")[0]
        problems[path] = problems[path] or reason

    def aside() -> list[str]:
        return [path for path, problem in problems.items() if problem or path in recorder.regions]

    while leak := side_channel(recorder, aside()):
        problems[leak[0]] = leak[1]
    events = tuple(recorder.events_outside(frozenset(filter(None, aside()))))
    numbers = recorder.numbers
    return RecordedTape(
        problems,
        recorder.regions,
        events,
        actions,
        types_of(recorder.inputs, mesh),
        types_of(recorder.outputs, mesh),
        types_of(recorder.hidden, mesh),
        {name: next(iter(value.grads)) for name, value in recorder.named.items() if value.grads},
        any(event.call.is_random for event in events if isinstance(event, CallEvent)),
        {name: numbers[value] for name, value in recorder.named.items() if value in numbers},
        tuple(recorder.input_numbers),
        tuple(recorder.output_numbers),
        frozenset(range(recorder.num_values)) - frozenset(numbers.values()),
        recorder.num_values,
    )
