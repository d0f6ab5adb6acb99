"""Placements of the gradients in a static forward, which are local tensors of their tensors' shapes."""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.static._record import Placements, Recorder, TensorRecord

__all__ = ["is_whole", "settle_gradients", "without_single_ranks"]


def settle_gradients(recorder: Recorder, mesh: DeviceMesh) -> None:
    """Choose the placements of each value's local gradients: those that arrived, made complete or cut where they have
    another part of the elements than the value."""
    for record in _uses(recorder):
        value = record.value
        if value is not None and value.is_parameter:  # nothing else tells the gradients of parameters
            value.grads |= record.grads
    for value in recorder.named.values():
        if len(value.grads) > 1:
            value.grads = {min(value.grads, key=str)}
    for record in _all(recorder):
        value, placements = record.value, record.placements
        if value is None or placements is None or len(value.grads) != 1:
            continue
        (grads,) = value.grads
        settled = tuple(
            g if mesh.size(axis) == 1 or _is_same_part(p, g) else _of_same_part(p)
            for axis, (p, g) in enumerate(zip(placements, grads, strict=True))
        )
        if settled != grads:
            value.grads, value.is_grad_moved = {settled}, True


def without_single_ranks(placements: Placements, mesh: DeviceMesh) -> Placements:
    """Placements, with Replicate on axes of size 1."""
    return tuple(p if mesh.size(axis) > 1 else Replicate() for axis, p in enumerate(placements))


def is_whole(placements: Placements | None, mesh: DeviceMesh) -> bool:
    """Whether a tensor is whole on every rank; a plain one is."""
    return placements is None or all(p.is_replicate() for p in without_single_ranks(placements, mesh))


def _is_same_part(placement: Placement, grad: Placement) -> bool:
    return placement == grad or (not _cuts(placement) and not _cuts(grad))


def _of_same_part(placement: Placement) -> Placement:
    """Where a gradient of another part than the tensor's is brought. One that is cut becomes a sum of zeros and itself,
    without communication, and is summed later, as in eager mode."""
    if _cuts(placement):
        return placement
    return Partial() if placement.is_replicate() else Replicate()


def _cuts(placement: Placement) -> bool:
    return not (placement.is_replicate() or placement.is_partial())


def _uses(recorder: Recorder) -> Iterator[TensorRecord]:
    for call in recorder.calls:
        yield from call.inputs
    yield from (b.input for calls in recorder.boundaries.values() for found in calls for b in found)


def _all(recorder: Recorder) -> Iterator[TensorRecord]:
    yield from _uses(recorder)
    for call in recorder.calls:
        yield from call.outputs
    yield from (b.output for calls in recorder.boundaries.values() for found in calls for b in found)
    yield from recorder.inputs
    yield from recorder.outputs
