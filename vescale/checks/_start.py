"""Finds the checks on a mesh, or among some ranks, and begins them for a new model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.checks._optimizer_steps import watch_optimizers
from vescale.checks._steps import StepChecks

__all__ = ["HASHES_OF_CHECKED_MESHES", "start_checks", "start_checks_among", "step_checks"]

# By default group. Equal meshes share one: ops give results on any of them (PyTorch remembers decisions by equal specs), and
# which of them are still there depends on each rank's garbage collector.
_BY_WORLD: weakref.WeakKeyDictionary[Any, dict[DeviceMesh | tuple[object, ...], StepChecks]] = (
    weakref.WeakKeyDictionary()
)


def step_checks(mesh: DeviceMesh) -> StepChecks | None:
    """The checks on a mesh; None: no model has been parallelized on it."""
    if hash(mesh) not in HASHES_OF_CHECKED_MESHES:
        return None
    return _BY_WORLD.get(dist.group.WORLD, _NONE).get(mesh) if dist.is_initialized() else None


def start_checks(mesh: DeviceMesh) -> StepChecks:
    """The checks on a mesh, for a new model, whose first forwards are compared fully. Called in one order on all ranks."""
    watch_optimizers(_note_step)
    return _begun(mesh, mesh.mesh.flatten().tolist(), [tuple(i) for i in (mesh.mesh >= 0).nonzero().tolist()])


def _note_step(mesh: DeviceMesh, numbers: Sequence[tuple[str, str]], gradients: tuple[str, str]) -> None:
    checks = step_checks(mesh)
    if checks is not None and checks.is_on:
        for name, text in (*numbers, gradients) if checks.names_gradients else numbers:
            checks.note(name, text)


def start_checks_among(ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]]) -> StepChecks:
    """The same for a model that is on no mesh of its own; these are not those of any mesh."""
    return _begun((tuple(ranks), tuple(coordinates)), ranks, coordinates)


def _begun(
    key: DeviceMesh | tuple[object, ...], ranks: Sequence[int], coordinates: Sequence[tuple[int, ...]]
) -> StepChecks:
    known = _BY_WORLD.setdefault(dist.group.WORLD, {})
    found = known.get(key)
    if found is None:
        HASHES_OF_CHECKED_MESHES.add(hash(key))
        found = known[key] = StepChecks(ranks, coordinates)
    found.begin()
    return found


# Of all keys that have ever been there: most DTensors of other code are told apart by them.
HASHES_OF_CHECKED_MESHES: set[int] = set()
_NONE: dict[DeviceMesh | tuple[object, ...], StepChecks] = {}
