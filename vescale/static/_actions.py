"""What a static forward does at a call site, decided from the recorded calls there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale.static._gradients import is_whole, without_single_ranks
from vescale.static._local_functions import local_function
from vescale.static._local_run import SIZE_READERS, SIZE_TAKERS, LocalRun
from vescale.static._step_records import Call
from vescale.static._tensor_type import TensorType, types_of


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
_OF_TENSOR_ITSELF = frozenset((
    _Tensor.backward, _Tensor.detach_, _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook,
    _Tensor.retain_grad, _Tensor.requires_grad_, _Tensor.data.__set__, _Tensor.grad.__get__, _Tensor.grad.__set__,
    _Tensor.requires_grad.__set__,
))  # fmt: skip


def name_of(function: Any) -> str:
    """The name of a torch function, of an attribute that of its getter's owner."""
    owner = getattr(getattr(function, "__self__", None), "__name__", "")
    name = getattr(function, "__name__", str(function))
    return owner if name == "__get__" and owner else name


def action_of(call: Call, mesh: DeviceMesh) -> Action | Problem | None:
    """What happens at the site of a call; None: nothing but the function on the local tensors."""
    if call.function in _OF_TENSOR_ITSELF and any(record.placements is not None for record in call.inputs):
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
