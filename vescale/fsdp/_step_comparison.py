"""``StepComparison``: ranks compare the forwards and backwards of a root before they communicate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from vescale.checks import StepChecks, StepMismatchError, start_checks_among
from vescale.fsdp._group import ParameterGroup
from vescale.gradients import DataParallelAxes

__all__ = ["StepComparison"]


class StepComparison:
    """Of the groups of one root (:class:`vescale.checks.StepChecks`). Inputs are each rank's own, and are not compared.

    =========  =================================================  =================================================
    event      which ranks compare it                             left out
    =========  =================================================  =================================================
    forward    those along the axis that shards, which gather     with gradients, if all is gathered; recomputations
    backward   all data-parallel ranks, which reduce; those       where gradients only accumulate
               along the axis that shards if replicas do not
    =========  =================================================  =================================================

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
        self._number = self._checks.num_models

    def forward(self, module: nn.Module, groups: Sequence[ParameterGroup]) -> None:
        """Before a forward of the root, or of a part of it, which has ``groups``.

        Raises StepMismatchError on every rank that comes.
        """
        checks = self._checks
        is_repeated, self.is_repeated = self.is_repeated, False
        if is_repeated or checks is None or not checks.is_on:
            return
        if torch.is_grad_enabled() and all(group.is_unsharded for group in groups):
            return
        self._num_forwards += 1
        checks.begin_forward(self._num_forwards)
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
        across_replicas = any(group.options.all_reduce for group in groups)
        axes = self._everywhere if across_replicas else self._along_shard
        checks.step(f"the backward of step {self._num_backwards} of {self._model}", axes, self._number)


def _num_ranks(axes: DataParallelAxes) -> int:
    return axes.shard_size * axes.num_replicas
