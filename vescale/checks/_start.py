"""Finds the checks on a mesh, or among some ranks, and begins them for a new model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vescale.checks._descriptions import hash_of
from vescale.checks._mismatches import STEPPED
from vescale.checks._steps import FIRST, StepChecks, check_every, is_unchecked
from vescale.compat import no_torch_function, note, spec_of

# What ranks compare of their optimizers' steps: hyperparameters, and for how many parameters there are gradients. Where
# each rank holds a part of every parameter, nothing else tells that one rank has another learning rate, skips a step,
# or has dropped a gradient. PyTorch's hooks before the step of any optimizer see the first steps, and then every
# ``VESCALE_CHECK_EVERY``-th; of the others, hyperparameters that have changed (a scheduler goes by each rank's own loss).

Row = tuple[str, str]
Listener = Callable[[DeviceMesh, Sequence[Row], Sequence[Row]], None]
# Called with a mesh on which an optimizer has parameters, the numbers of a group, and how many gradients there are.
STEP_LISTENERS: list[Listener] = []
_COUNTS: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
_SEEN: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
_NUMBERS = (bool, int, float, str)
_MAX_GROUPS = 8


def watch_optimizers(listener: Listener) -> None:
    """From now on, tell ``listener`` of steps of optimizers that hold DTensors."""
    if not STEP_LISTENERS:
        note("checks._start:torch", "torch.optim.optimizer._global_optimizer_pre_hooks")
        register_optimizer_step_pre_hook(_before_step)
    if listener not in STEP_LISTENERS:
        STEP_LISTENERS.append(listener)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if next(_dtensors(optimizer), None) is None:
        return
    count = _COUNTS[optimizer] = _COUNTS.get(optimizer, 0) + 1
    every = check_every()
    fully = count <= FIRST or bool(every and count % every == 0)
    groups, seen = [_plain_numbers(group) for group in optimizer.param_groups], _SEEN.get(optimizer)
    if not fully and groups == seen:
        return
    _SEEN[optimizer] = groups
    if is_unchecked():
        return
    earlier: list[Any] = seen if seen is not None and len(seen) == len(groups) else [None] * len(groups)
    with no_torch_function():
        for mesh in {id(spec_of(p).mesh): spec_of(p).mesh for p in _dtensors(optimizer)}.values():
            for number, (group, now, before) in enumerate(zip(optimizer.param_groups, groups, earlier)):
                params = [p for p in group["params"] if isinstance(p, DTensor) and spec_of(p).mesh is mesh]
                if not params or (not fully and now == before):
                    continue
                name = f"step {count} of {type(optimizer).__name__}, group {number}"
                rows = [(f"{STEPPED}{key} of {name}", text) for key, text in _numbers(group)]
                if number >= _MAX_GROUPS:
                    rows = [(f"{STEPPED}{name}", hash_of(repr(rows)))]
                gradients: list[Row] = []
                if fully:
                    count_text = f"{sum(p.grad is not None for p in params)} of {len(params)}"
                    gradients.append((f"{STEPPED}number of gradients of {name}", count_text))
                for listener in STEP_LISTENERS:
                    listener(mesh, rows, gradients)


def _dtensors(optimizer: Optimizer) -> Iterator[DTensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor))


def _numbers(group: dict[str, Any]) -> Iterator[Row]:
    found = ((name, _value(value)) for name, value in group.items() if name not in ("params", "param_names"))
    return ((name, text) for name, text in found if text)


def _plain_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """What can be compared with an earlier step without a device."""
    return {
        name: value
        for name, value in group.items()
        if isinstance(value, _NUMBERS) or (type(value) is tuple and all(isinstance(each, _NUMBERS) for each in value))
    }


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if type(value) is torch.Tensor and value.is_cpu and not value.ndim else ""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_value, value))})"
    return repr(value) if isinstance(value, _NUMBERS) else ""


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


def _note_step(mesh: DeviceMesh, numbers: Sequence[Row], gradients: Sequence[Row]) -> None:
    checks = step_checks(mesh)
    if checks is not None and checks.is_on:
        for name, text in (*numbers, *gradients) if checks.names_gradients else numbers:
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
