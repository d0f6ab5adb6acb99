"""``StepComparison``: ranks compare the forwards and backwards of a root before they communicate."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.checks import (
    WRITTEN_GATHERED,
    StepChecks,
    StepMismatchError,
    describe_draw,
    is_unchecked,
    start_checks_among,
)
from vescale.compat import DTensorSpec
from vescale.compat.model_hooks import DRAW_LISTENERS
from vescale.fsdp._group import ParameterGroup
from vescale.gradients import DataParallelAxes
from vescale.rng import default_generator

# What random ops have drawn into DTensors on meshes of sharded parameters, until it is compared.
_DRAWS: weakref.WeakKeyDictionary[DeviceMesh, deque[tuple[str, str]]] = weakref.WeakKeyDictionary()


def watch_draws(groups: Sequence[ParameterGroup]) -> None:
    """From now on, ranks compare what they draw into tensors on the meshes of these groups."""
    for mesh in _meshes(groups):
        _DRAWS.setdefault(mesh, deque(maxlen=_MAX_DRAWS))
    if _note_draw not in DRAW_LISTENERS:
        DRAW_LISTENERS.append(_note_draw)


def _note_draw(spec: DTensorSpec, what: str, generator: torch.Generator | None) -> None:
    draws = _DRAWS.get(spec.mesh)
    if draws is not None and not is_unchecked():
        generator = generator or default_generator(torch.device(spec.mesh.device_type))
        draws.append(describe_draw(spec.shape, what, generator))


def _meshes(groups: Sequence[ParameterGroup]) -> Iterator[DeviceMesh]:
    for group in groups:
        for parameter in group.parameters:
            if isinstance(parameter.sharded, DTensor):
                yield parameter.sharded.device_mesh


_MAX_DRAWS = 64


class StepComparison:
    """Of the groups of one root (:class:`vescale.checks.StepChecks`). Inputs are each rank's own, and are not compared.

    =========  =================================================  =================================================
    event      which ranks compare it                             left out
    =========  =================================================  =================================================
    forward    those along the axis that shards, which gather     with gradients, if all is gathered; recomputations
    backward   all data-parallel ranks, which reduce; those       where gradients only accumulate
               along the axis that shards if replicas do not
    =========  =================================================  =================================================

    Random numbers that were drawn into parameters are compared with the next event of all data-parallel ranks.

    Where groups have several meshes, along that with the most data-parallel ranks. All of them make it together.

    Attributes:
        is_repeated: whether an exception has ended the forward that was compared last. Others may be in its gathers, and the
            next one is taken as the same.
    """

    def __init__(self, model: str, groups: Sequence[ParameterGroup]) -> None:
        self._model = model
        self._num_forwards = self._num_backwards = 0
        self.is_repeated = False
        self._checks: StepChecks | None = None
        axes = max((group.axes for group in groups), key=_num_ranks, default=None)
        if axes is None or axes.mesh.get_coordinate() is None:
            return
        along, own = axes.data_parallel, sorted((*axes.replicate, axes.shard))
        coordinates = [tuple(full[axis] for axis in own) for full in along.coordinates]
        self._along_shard = (own.index(axes.shard),)
        self._everywhere = tuple(range(len(own)))
        self._checks = start_checks_among(dist.get_process_group_ranks(along.group), coordinates)
        self._checks.start()
        self._meshes = set(_meshes(groups))
        self._number = self._checks.num_models

    def forward(self, module: nn.Module, groups: Sequence[ParameterGroup]) -> None:
        """Before a forward of the root, or of a part of it, which has ``groups``.

        Raises StepMismatchError on every rank that comes.
        """
        checks = self._checks
        is_repeated, self.is_repeated = self.is_repeated, False
        if is_repeated or checks is None or not checks.is_on:
            return
        if torch.is_grad_enabled() and all(group.is_gathered for group in groups):
            return
        self._num_forwards += 1
        checks.begin_forward(self._num_forwards)
        self._note_draws(checks)
        name = type(module).__name__.removeprefix("FSDP")
        of = f"{name} of {self._model}" if name != self._model else name
        mode = "in training" if module.training else "in evaluation"
        mode += ", with gradients" if torch.is_grad_enabled() else ", without gradients"
        try:
            checks.step(f"forward {self._num_forwards} of {of}, {mode}", self._along_shard, self._number)
        except StepMismatchError:
            self._num_forwards -= 1  # it does not run
            raise

    def backward(self, groups: Sequence[ParameterGroup]) -> None:
        """When a backward begins that reduces gradients of ``groups``.

        Raises StepMismatchError on every rank that comes.
        """
        checks = self._checks
        if checks is None or not checks.is_on or not any(group.reduce_gradients for group in groups):
            return
        self._num_backwards += 1
        checks.begin_backward(self._num_backwards)
        self._note_draws(checks)
        across_replicas = any(group.options.all_reduce for group in groups)
        axes = self._everywhere if across_replicas else self._along_shard
        try:
            checks.step(f"the backward of step {self._num_backwards} of {self._model}", axes, self._number)
        except StepMismatchError:
            self._num_backwards -= 1
            raise

    def note_write(self, parameter: str, digest: str) -> None:
        """What a forward has written to a parameter that all ranks have gathered is compared with the next event."""
        if self._checks is not None and self._checks.is_on:
            self._checks.note(f"{WRITTEN_GATHERED}{parameter}", digest)

    def _note_draws(self, checks: StepChecks) -> None:
        for mesh in self._meshes:
            draws = _DRAWS.get(mesh)
            while draws:
                checks.note(*draws.popleft())


def _num_ranks(axes: DataParallelAxes) -> int:
    return axes.shard_size * axes.num_replicas
