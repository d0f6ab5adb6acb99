"""Placements of the gradients in a static forward, which are local tensors of their tensors' shapes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, spec_of
from vescale.errors import StaticStepError
from vescale.ops import enter_local, entries
from vescale.static._record import Recorder
from vescale.static._state import is_inside
from vescale.static._step_records import Placements, TensorRecord, Value

# Functions whose backward moves elements, and adds none.
_MOVERS = frozenset(
    ("cat", "chunk", "clone", "concat", "concatenate", "contiguous", "flatten", "movedim", "permute", "reshape")
)
_MOVERS |= {"split", "split_with_sizes", "squeeze", "stack", "swapaxes", "t", "tensor_split", "transpose", "unbind"}
_MOVERS |= {"unflatten", "unsqueeze", "view"}


def settle_gradients(recorder: Recorder, mesh: DeviceMesh) -> dict[str, str]:
    """Choose the placements of each value's gradient: those that were recorded when it arrived, and for parameters those of
    the gradients that their uses returned. Sets ``is_grad_moved`` where the value is sharded and its gradient is not, or
    vice versa.

    Returns:
        Reasons by the paths of modules that cannot be static, because gradients in them could differ from eager mode.
    """
    wrong: dict[Value, str] = {}
    passed_on = _passed_on(recorder)
    sent = _sent(recorder, mesh)
    for used, kinds in sent.items():
        if used.is_parameter:
            used.grads |= kinds
    for value in recorder.named.values():
        if len(value.grads) > 1:
            value.grads = {min(value.grads, key=str)}  # a sum before a whole tensor
    for record in _all(recorder):
        held, placements = record.value, record.placements
        if held is None or placements is None or len(held.grads) != 1:
            continue
        value, (grads,) = held, held.grads
        if not _adds_alike(sent.get(value, set()), placements if value.is_parameter else grads, grads, mesh):
            wrong[value] = f"its uses send gradients with placements {_text(sent[value])}"
        settled = local_gradient(placements, grads, mesh)
        if settled == grads:
            continue
        value.is_grad_moved = True
        if value.is_parameter or not _is_part(placements, grads, settled):
            value.grads = {settled}
            if not value.is_parameter and value not in passed_on:
                wrong[value] = f"its gradient is placed as {grads}"
    return _by_module(recorder, wrong) if wrong else {}


def local_gradient(placements: Placements, grads: Placements, mesh: DeviceMesh) -> Placements:
    """The placements with which a gradient has the local shape of its tensor. A sharded gradient of a replicated tensor
    becomes Partial without communication: its shard, and zeros elsewhere."""
    return tuple(
        g if mesh.size(axis) == 1 or p == g or not (_cuts(p) or _cuts(g)) else _of_same_part(p)
        for axis, (p, g) in enumerate(zip(placements, grads, strict=True))
    )


def without_single_ranks(placements: Placements, mesh: DeviceMesh) -> Placements:
    """Placements, with Replicate on axes of size 1."""
    return tuple(p if mesh.size(axis) > 1 else Replicate() for axis, p in enumerate(placements))


def is_whole(placements: Placements | None, mesh: DeviceMesh) -> bool:
    """Whether a tensor is whole on every rank; a plain one is."""
    return placements is None or all(p.is_replicate() for p in without_single_ranks(placements, mesh))


def _adds_alike(sent: set[Placements], target: Placements, grads: Placements, mesh: DeviceMesh) -> bool:
    """Whether the sum of gradients that are first redistributed to ``grads`` has the same bits as in eager mode, which adds
    them as they arrive. It has if the result is sharded, because the shard of a sum is the sum of shards; and for
    Partial, to which Replicate is converted by a division by the number of ranks, if that is a power of two."""
    mixed = [axis for axis in range(mesh.ndim) if len({placements[axis] for placements in sent}) > 1]
    for axis in mixed:
        kinds = {placements[axis] for placements in sent}
        is_cut = _cuts(target[axis]) and kinds <= {Replicate(), target[axis]}
        size = mesh.size(axis)
        is_pending = grads[axis] == Partial() and kinds == {Replicate(), Partial()} and size & (size - 1) == 0
        if not is_cut and not (is_pending and len(mixed) == 1):
            return False
    return True


def _is_part(placements: Placements, grads: Placements, settled: Placements) -> bool:
    """Whether a gradient differs from its tensor only by being sharded where the tensor is replicated. Its shard is then a
    part of the local gradient."""
    for axis, (placement, grad, new) in enumerate(zip(placements, grads, settled)):
        if grad != new and (not placement.is_replicate() or type(grad) is not Shard or grad in placements[axis + 1 :]):
            return False
    return True


def _of_same_part(placement: Placement) -> Placement:
    if _cuts(placement):
        return placement
    return Partial() if placement.is_replicate() else Replicate()


def _cuts(placement: Placement) -> bool:
    return not (placement.is_replicate() or placement.is_partial())


def _sent(recorder: Recorder, mesh: DeviceMesh) -> dict[Value, set[Placements]]:
    """The placements of the gradients that the uses of a value return; those that differ only along axes of size 1 count
    once."""
    found: dict[Value, dict[Placements, Placements]] = {}
    for record in _uses(recorder):
        if record.value is not None:
            for grads in record.grads:
                found.setdefault(record.value, {}).setdefault(without_single_ranks(grads, mesh), grads)
    return {value: set(sent.values()) for value, sent in found.items()}


def _passed_on(recorder: Recorder) -> set[Value]:
    """Values whose gradients are only moved by the backward of the function that returned them, without arithmetic. Their
    bits do not depend on the placements of the gradient."""
    found = {b.output.value for b in recorder.boundaries}
    for call in recorder.calls:
        entry = entries().get(call.function)
        is_attention = call.changed == "registered function" and entry is not None and entry.backward == "custom"
        if is_attention or getattr(call.function, "__name__", "") in _MOVERS:
            found.update(record.value for record in call.outputs)
    return {value for value in found if value is not None}


def _by_module(recorder: Recorder, wrong: Mapping[Value, str]) -> dict[str, str]:
    """Reasons by the path of the innermost module that contains a value and all its uses."""
    paths: dict[Value, list[str]] = {value: [] for value in wrong}
    records = [(call.module, (*call.inputs, *call.outputs)) for call in recorder.calls]
    records += [(b.placing.instruction.path, (b.input, b.output)) for b in recorder.boundaries]
    for path, found in records:
        for record in found:
            if record.value in paths:
                paths[record.value].append(path)
    crossing = {
        path: {record.value for call in calls for records in call for record in records}
        for path, calls in recorder.module_calls.items()
    }
    problems: dict[str, str] = {}
    for value, reason in wrong.items():
        path = _common_path(paths[value])
        while path and (path not in crossing or value in crossing[path]):
            path = path.rpartition(".")[0]
        name = f"the parameter {value.name}" if value.is_parameter else "a tensor"
        problems.setdefault(path, f"{name}: {reason}")
    return problems


def _common_path(paths: list[str]) -> str:
    common = paths[0] if paths else ""
    while not all(is_inside(path, common) for path in paths):
        common = common.rpartition(".")[0]
    return common


def _text(placements: set[Placements]) -> str:
    return " and ".join(sorted(map(str, placements)))


def _uses(recorder: Recorder) -> Iterator[TensorRecord]:
    for call in recorder.calls:
        yield from call.inputs
    yield from (b.input for b in recorder.boundaries)


def _all(recorder: Recorder) -> Iterator[TensorRecord]:
    yield from _uses(recorder)
    for call in recorder.calls:
        yield from call.outputs
    yield from (b.output for b in recorder.boundaries)
    yield from recorder.inputs
    yield from recorder.outputs


# Local tensors of parameters and buffers, also of those that got no gradient in the recorded step.


@dataclass(eq=False)
class Shown:
    """What modules show in place of a parameter or buffer: the local tensor, in autograd."""

    of: DTensor
    local: torch.Tensor
    tensor: torch.Tensor


# By the parameter and its ``grad``, as long as somebody holds them.
_SHOWN: weakref.WeakValueDictionary[Any, Shown] = weakref.WeakValueDictionary()


def shown_local(x: DTensor, grad: tuple[Placement, ...] | None, name: str) -> Shown:
    """The local tensor of a parameter or buffer; ``grad``: placements of its local gradients, None if there are none.

    All forwards show the same one, so that gradients of several forwards are added in the order of eager mode.
    """
    local = with_attributes(x)
    if not x.requires_grad:
        return Shown(x, local, local)
    known = _SHOWN.get((id(x), grad))
    if known is not None and known.of is x and known.local is local and known.tensor.data_ptr() == local.data_ptr():
        return known
    tensor = (
        without_gradient(local.detach().requires_grad_(), f"the parameter {name}")
        if grad is None
        else enter_local(x, grad)
    )
    tensor.__dict__ = x.__dict__
    made = _SHOWN[id(x), grad] = Shown(x, local, tensor)
    return made


def with_attributes(x: DTensor) -> torch.Tensor:
    """The local tensor of a parameter or buffer, with its attributes: ``isinstance(weight, nn.Parameter)``, and what
    programs keep at weights."""
    local = local_of(x)
    if local.__dict__ is not x.__dict__:
        local.__dict__ = x.__dict__
    return local


def without_gradient(x: torch.Tensor, what: str) -> torch.Tensor:
    """The same tensor, which needs gradients. One that arrives is an error, because nobody knows what it stands for."""
    found: torch.Tensor = _WithoutGradient.apply(x, what)
    return found


def refuse_second_derivatives(_: Any) -> None:
    """Before the backward of a static forward begins: the placements of gradients of gradients are not known."""
    if torch.is_grad_enabled():
        raise StaticStepError(
            "backward(create_graph=True) was called on a model in static mode, whose step was recorded without it: "
            "second derivatives (gradient penalties, Hessian-vector products) need DTensors. Compute them in the "
            "first step already, so that the model runs in eager mode, or parallelize with mode='eager'"
        )


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, what: str) -> torch.Tensor:
        ctx.what = what
        return make_dtensor(local_of(x), spec_of(x), requires_grad=True) if isinstance(x, DTensor) else x.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise StaticStepError(
            f"{ctx.what} of a model in static mode got a gradient, but got none in the recorded step; use the same "
            "outputs in the loss of the first step, or parallelize with mode='eager'"
        )
