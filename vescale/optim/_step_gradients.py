"""The gradients of one optimizer step: what to do where some are missing, pending, placed otherwise, or not finite.

A gradient that is missing on some ranks counts as zeros there; one that is missing on all is no gradient. To tell the two
apart, ranks write which ones they miss to the store, and only ranks that miss one wait for the others: where all gradients
are there, a step waits for nobody.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

from vescale.comm import wait_limit
from vescale.compat import (
    AsyncCollectiveTensor,
    default_store,
    default_timeout,
    is_alone,
    local_of,
    make_dtensor,
    make_spec,
    spec_of,
)
from vescale.errors import MissingGradientError
from vescale.gradients import reduce_pending
from vescale.optim._linked_ranks import LinkedRanks, all_finite

__all__ = ["StepGradients", "local_part"]

_HISTORY = 64  # steps with missing gradients that a rank remembers for slower ranks
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of a tensor or DTensor, without autograd; waits for a pending collective."""
    if type(tensor) is torch.Tensor and not tensor.requires_grad:
        return tensor
    local = local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class StepGradients:
    """Collects the gradients of one optimizer, step by step; made alike on all ranks of the parameters."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._linked = LinkedRanks(kind)
        self._key = ""
        self._step = 0
        self._missed: dict[int, dict[int, list[int]]] = {}

    def collect(
        self, parameters: Sequence[torch.Tensor], names: Sequence[str], together: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor | None] | None:
        """For each parameter its gradient, placed like it, or None if no rank of its mesh has one; None: skip this step,
        because a gradient is not finite on one of the ranks that :class:`LinkedRanks` finds by the parameters ``together``.

        Communication: one all-reduce for all Partial gradients together; redistributions of those that are placed otherwise
        than their parameters; with ``together`` one all-reduce of a byte.

        Raises:
            ValueError: a gradient that only replicas of this rank's part have: their parameters would differ.
            RuntimeError: a sparse gradient; a rank that does not come in time although gradients are missing here.
        """
        gradients = [parameter.grad for parameter in parameters]
        for gradient, name in zip(gradients, names):
            if gradient is not None and gradient.is_sparse:
                raise MissingGradientError(
                    f"parameter {name} has a sparse gradient; use an optimizer for those, or sparse=False"
                )
        gradients = self._with_zeros(parameters, gradients, names)
        held = [index for index, gradient in enumerate(gradients) if gradient is not None]
        reduced = reduce_pending([g for g in gradients if g is not None])
        for index, gradient in zip(held, reduced):
            gradients[index] = _placed_like(parameters[index], gradient)
        if together:
            is_finite = _is_finite([g for g in gradients if g is not None])
            device = local_part(together[0]).device
            if not all_finite(is_finite, self._linked.of(together), device):
                return None
        return gradients

    def _with_zeros(
        self, parameters: Sequence[torch.Tensor], gradients: list[torch.Tensor | None], names: Sequence[str]
    ) -> list[torch.Tensor | None]:
        shared = [index for index, p in enumerate(parameters) if isinstance(p, DTensor) and p.device_mesh.size() > 1]
        if not shared or not dist.is_initialized() or is_alone():
            return gradients
        self._step += 1
        store = default_store()
        if not self._key:
            self._key = _common_key(self._kind, [parameters[index] for index in shared], [names[i] for i in shared])
        missing = [index for index in shared if gradients[index] is None]
        note: dict[int, list[int]] = {index: [] for index in missing}
        for index in shared:
            gradient = gradients[index]
            if isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements):
                note[index] = [axis for axis, p in enumerate(gradient.placements) if p.is_partial()]
        if note:
            self._missed[self._step] = note
            while len(self._missed) > _HISTORY:
                del self._missed[next(iter(self._missed))]
        store.set(f"{self._key} {dist.get_rank()}", json.dumps([self._step, list(self._missed.items())]))
        if not missing:
            return gradients
        found, notes = list(gradients), {dist.get_rank(): note}
        for index in missing:
            found[index] = self._zeros(store, index, parameters[index], names[index], notes)
        return found

    def _zeros(
        self, store: dist.Store, index: int, parameter: torch.Tensor, name: str, notes: dict[int, dict[int, list[int]]]
    ) -> torch.Tensor | None:
        """Zeros with the placements that the gradient has elsewhere; None: it is missing on all ranks."""
        assert isinstance(parameter, DTensor)
        spec = spec_of(parameter)
        mesh, placements = spec.mesh, list(spec.placements)
        own = mesh.get_coordinate()
        is_there = False
        pending: list[int] = []
        replicas: list[int] = []
        for coordinate in itertools.product(*map(range, mesh.shape)):
            rank = int(mesh.mesh[coordinate])
            if rank not in notes:
                notes[rank] = self._note_of(store, rank, name)
            note = notes[rank].get(index)
            if note == []:
                continue
            is_there = True
            pending = note or pending
            differs = [axis for axis in range(mesh.ndim) if own is not None and coordinate[axis] != own[axis]]
            if all(placements[axis].is_replicate() and axis not in (note or ()) for axis in differs):
                replicas.append(rank)
        if not is_there:
            return None
        if replicas:
            raise MissingGradientError(
                f"parameter {name} of shape {tuple(parameter.shape)} and placements {tuple(placements)} has no gradient on "
                f"rank {dist.get_rank()}, but has one on ranks {replicas}, which hold the same part of it: their copies of "
                "the parameter would differ. Reduce gradients over the replicas before the step, or set .grad to None on all"
            )
        for axis in pending:
            placements[axis] = Partial()
        local = torch.zeros_like(local_of(parameter))
        return make_dtensor(local, make_spec(mesh, placements, spec.shape, spec.stride, parameter.dtype))

    def _note_of(self, store: dist.Store, rank: int, name: str) -> dict[int, list[int]]:
        """What the rank has written about this step; waits until it has come to it."""
        key, pause = f"{self._key} {rank}", 0.0005
        deadline = time.monotonic() + (wait_limit() or default_timeout()).total_seconds()
        while True:
            if store.check([key]):
                step, missed = json.loads(store.get(key))
                if step >= self._step:
                    notes = dict(missed)
                    return {int(index): axes for index, axes in notes.get(self._step, {}).items()}
            if time.monotonic() > deadline:
                raise MissingGradientError(
                    f"parameter {name} has no gradient on rank {dist.get_rank()}, which waits to learn whether rank {rank} "
                    f"has one; that rank did not come to step {self._step} of its optimizer in time. All ranks of a mesh "
                    "must call step()"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def _is_finite(gradients: Sequence[torch.Tensor]) -> bool:
    locals_ = [local_part(gradient) for gradient in gradients]
    checks = [torch.isfinite(local).all() for local in locals_ if local.numel()]
    return all(check.item() for check in checks)


def _placed_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if tuple(gradient.placements) == tuple(parameter.placements):
        return gradient
    return gradient.redistribute(parameter.device_mesh, parameter.placements)


def _common_key(kind: str, parameters: Sequence[torch.Tensor], names: Sequence[str]) -> str:
    """A name for an optimizer that ranks with the same parameters have in common, and other optimizers do not."""
    digest = hashlib.sha256(kind.encode())
    for parameter, name in zip(parameters, names, strict=True):
        digest.update(repr((name, tuple(parameter.shape), str(parameter.dtype))).encode())
    own = f"vescale optimizer {digest.hexdigest()[:24]}"
    with _LOCK:
        counter = _COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(own, itertools.count())
    return f"{own} {next(counter)}"
