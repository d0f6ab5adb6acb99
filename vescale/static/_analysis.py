"""From a recorded step to what becomes of its modules, and of each call."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.static._gradients import is_whole, settle_gradients, without_single_ranks
from vescale.static._local_functions import local_function
from vescale.static._observed_ops import SIZE_READERS, SIZE_TAKERS, LocalRun
from vescale.static._record import CallEvent, Event, Recorder
from vescale.static._state import is_inside
from vescale.static._step_records import Call, Placements, TensorRecord, Value
from vescale.static._tensor_type import TensorType, types_of

# What a static forward does at a call site, decided from the recorded calls there.


@dataclass(frozen=True)
class ReadSizes:
    """A function that reads sizes of a tensor, of which the model sees the global ones."""

    function: Any
    factors: tuple[int, ...]


@dataclass(frozen=True)
class TakeSizes:
    """A function that takes the global sizes of its result."""

    function: Any
    factors: tuple[int, ...]


@dataclass(frozen=True)
class Eager:
    """A function that runs on DTensors.

    Attributes:
        reason: why.
        communication: collectives that the recorded call started.
    """

    function: Any
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    reason: str = field(compare=False)
    communication: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Problem:
    """What cannot be done at a call site; its module runs in eager mode."""

    reason: str


Action = ReadSizes | TakeSizes | Eager

_Tensor: Any = torch.Tensor
# What they do is seen in the backward of this tensor alone.
OF_TENSOR_ITSELF = frozenset((
    _Tensor.backward, _Tensor.detach_, _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook,
    _Tensor.retain_grad, _Tensor.requires_grad_, _Tensor.data.__set__, _Tensor.grad.__get__, _Tensor.grad.__set__,
    _Tensor.requires_grad.__set__, _Tensor.grad_fn.__get__, _Tensor.is_leaf.__get__,
    torch.autograd.grad, torch.autograd.backward,
))  # fmt: skip


def name_of(function: Any) -> str:
    """The name of a torch function, of an attribute that of its getter's owner; of what an entry of the plan places
    otherwise, of which tapes have a weak reference."""
    if isinstance(function, weakref.ref):
        return f"the entry for {getattr(function(), 'requester', 'a module')}"
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    name = getattr(function, "__name__", str(function))
    return owner if name == "__get__" and owner else name


def action_of(call: Call, mesh: DeviceMesh) -> Action | Problem | None:
    """What happens at the site of a call; None: nothing but the function on the local tensors."""
    if call.function in OF_TENSOR_ITSELF and any(record.placements is not None for record in call.inputs):
        return Problem(f"{name_of(call.function)} belongs to the tensor itself, of which there would be two")
    reason = _why_not_plain(call, mesh)
    if not reason:
        return None
    if call.local_run is LocalRun.TRANSFORMED:
        return Problem(f"{name_of(call.function)} runs on DTensors, or draws random numbers, in a function transform")
    for record in (*call.inputs, *call.outputs):
        if record.value is not None and len(record.value.grads) > 1:
            return Problem(f"a gradient arrives in several placements: {record.value.grads}")
    inputs, outputs = types_of(call.inputs, mesh), types_of(call.outputs, mesh)
    if any(r.value is not None and 1 < r.num_gradients < r.value.num_gradients for r in call.inputs):
        # On DTensors, they would be added before the others.
        return Problem(
            f"{name_of(call.function)} sends several gradients of a tensor that has other uses, and {reason}"
        )
    if not call.changed and not call.reads_other_unit and not _why_not_in_backward(call, mesh):
        if call.function in SIZE_READERS and call.local_run is LocalRun.SIZES and inputs[0].is_even:
            return ReadSizes(call.function, inputs[0].factors)
        if call.function in SIZE_TAKERS and call.local_run is LocalRun.TAKES_SIZES and outputs[0].is_even:
            return TakeSizes(call.function, outputs[0].factors)
    # The gradient of what is copied is brought to the placements that it has, as that of a function on DTensors is.
    checked = call.inputs[:1] if call.function is torch.Tensor.copy_ else call.inputs
    is_grad_moved = any(r.value is not None and r.value.is_grad_moved for r in checked)
    is_on_locals = not is_grad_moved and local_function(call.function, inputs, outputs) is not None
    if is_on_locals and call.reads_other_unit:
        return Problem(f"{name_of(call.function)} gets a parameter of a unit that does not run")
    has_grads = any(r.requires_grad for r in (*call.inputs, *call.outputs))
    if call.writes and (call.has_gaps or has_grads) and not is_on_locals:
        return Problem(
            f"{name_of(call.function)} writes in place, with a gradient or between other elements, and {reason}"
        )
    return Eager(call.function, inputs, outputs, reason, tuple(call.communication))


def _why_not_plain(call: Call, mesh: DeviceMesh) -> str:
    """Why the function may not simply run on the local tensors; "" if it may."""
    if call.reads_other_unit:
        return "it gets a parameter of a unit that does not run"
    if call.changed and (call.is_random or not _is_whole(call, mesh)):
        return call.changed
    if call.local_run is not LocalRun.SAME and not (call.writes and _is_whole(call, mesh)):
        return f"on the local tensors, it returns {call.local_run.value}"
    return _why_not_in_backward(call, mesh)


def _why_not_in_backward(call: Call, mesh: DeviceMesh) -> str:
    if any(record.value is not None and record.value.is_grad_moved for record in call.outputs):
        return "gradients of its results arrive in other placements than theirs"
    for record in call.inputs:
        if record.value is not None and record.grads:
            if record.value.is_grad_moved:
                return f"it sends a gradient with placements {record.grads} of a tensor with others"
            found, settled = (
                {without_single_ranks(p, mesh) for p in placements} for placements in (record.grads, record.value.grads)
            )
            if found != settled:
                return f"it sends a gradient with placements {found}, and the tensor's gradient has {settled}"
    if call.moves_gradients and not _is_whole(call, mesh):
        return "its backward moves tensors"
    return "its backward reduces pending sums" if _reduces_gradients(call, mesh) else ""


def _reduces_gradients(call: Call, mesh: DeviceMesh) -> bool:
    """Whether gradients arrived as pending sums along an axis, and one was sent that is none: attention, whose backward is
    not linear. Functions of vescale's reduce the gradient themselves, and no op is seen to move it."""
    arrived = [p for r in call.outputs if r.value is not None for p in r.value.grads]
    sent = [p for r in call.inputs for p in r.grads]
    return any(
        any(p[axis].is_partial() for p in arrived) and any(not p[axis].is_partial() for p in sent)
        for axis in range(mesh.ndim)
        if mesh.size(axis) > 1
    )


def _is_whole(call: Call, mesh: DeviceMesh) -> bool:
    """Whether all tensors and gradients are whole on every rank, so that nothing can be moved."""
    records = (*call.inputs, *call.outputs)
    grads = [p for r in records if r.value is not None for p in r.value.grads | r.grads]
    return all(is_whole(p, mesh) for p in [*(r.placements for r in records), *grads])


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
