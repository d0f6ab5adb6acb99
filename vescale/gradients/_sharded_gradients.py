"""``ShardedGradients``: gradients of parameters that are sharded together, from every rank's to this rank's part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import DBuffer
from vescale.comm import all_reduce_
from vescale.compat import (
    DTensorSpec,
    make_dtensor,
    note,
    permit_gradients_of_any_dtype,
    run_post_accumulate_hooks,
)
from vescale.gradients._arrival_hooks import hooks_of_programs
from vescale.gradients._axis_sets import AxisSet
from vescale.gradients._buffer_reduction import BufferReduction
from vescale.gradients._complete_gradient import added, gradient_spec, local_part
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._local_contribution import pending_axes
from vescale.gradients._reduction import Reduction, Stage
from vescale.gradients._unreduced_gradients import GatheredParameter, UnreducedGradients
from vescale.placements import redistribute

__all__ = ["ShardedGradients"]

_COUNTS_WITH_UNREDUCED = "_vescale_counts_with_unreduced"
"""A mark of ``.grad``: clearing it clears what has not been reduced, too."""


class ShardedGradients:
    """Contributions, and what becomes of them.

    Args:
        parameters, axes: of a group, which is cut over ``axes.shard``.
        slots: (offset, elements, shape unless it is flat) of each gradient's part in this rank's piece.
        to_exchange: gives the buffer that is reduced, for that of whole gradients: the same, or one in another order.
        dtype, device: of the sharded gradients.
    """

    def __init__(
        self,
        parameters: Sequence[GatheredParameter],
        axes: DataParallelAxes,
        slots: Sequence[tuple[int, int, tuple[int, ...] | None]],
        to_exchange: Callable[[DBuffer], DBuffer],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.axes, self.dtype, self.device = axes, dtype, device
        self._parameters, self._slots, self.to_exchange = parameters, slots, to_exchange
        self.unreduced = UnreducedGradients(parameters)
        self._reductions: dict[str, BufferReduction] = {}
        self._shown: set[int] = set()
        self._stand_ins: dict[int, torch.Tensor] = {}
        self.carried: tuple[torch.Tensor, list[int]] | None = None
        """What earlier backwards have reduced, and received, whose sum over the replicas is pending."""

    # Between backwards that do not reduce to the end

    def show_unreduced(self) -> None:
        """Until they are reduced, gradients that backwards have left are ``.grad`` of the sharded parameters: DTensors that
        are pending over the ranks, in the memory where more is added. Who clears them, or reads them, does so to what this
        step has accumulated. A ``.grad`` that has been reduced already stays, and clearing it clears both."""
        if self.unreduced.has_any:
            note("gradients._sharded_gradients:instance", self)
            pending = {self.axes.shard, *self.axes.replicate}
            for index in range(len(self._parameters)):
                self._show(index, self.unreduced.shown(index), pending)

    def _show_carried(self) -> None:
        """The same for what only waits for the sum over the replicas."""
        if self.carried is not None:
            for index, received in enumerate(self.carried[1]):
                if received:
                    self._show(index, self._part(self.carried[0], index), set(self.axes.replicate))

    def _show(self, index: int, local: torch.Tensor, pending: set[int]) -> None:
        parameter = self._parameters[index]
        sharded, op = parameter.sharded, "sum" if self.unreduced.are_of_one_loss else "avg"
        assert isinstance(sharded, DTensor)
        if not sharded.requires_grad:
            return
        if sharded.grad is None:
            also = {self.axes.resting(axis) for axis in parameter.contribution.pending}
            placements: list[Placement] = list(sharded.placements)
            for axis in pending | also:
                placements[axis] = Partial("sum" if axis in also else op)
            spec = gradient_spec(sharded, placements, local.dtype)
            if local.dtype != sharded.dtype:
                permit_gradients_of_any_dtype(sharded)
            sharded.grad = self._stand_ins[index] = make_dtensor(local, spec)
        setattr(sharded.grad, _COUNTS_WITH_UNREDUCED, True)
        self._shown.add(index)

    def drop_cleared(self) -> None:
        """Forget what belongs to a ``.grad`` that the user has cleared, or replaced, since it was shown."""
        for index in self._shown:
            gradient = self._parameters[index].sharded.grad
            if gradient is None or not hasattr(gradient, _COUNTS_WITH_UNREDUCED):
                self._stand_ins.pop(index, None)
                self.unreduced.forget(index)
                if self.carried is not None and self.carried[1][index]:
                    self._part(self.carried[0], index).zero_()
                    self.carried[1][index] = 0
            elif index in self._stand_ins and gradient is not self._stand_ins[index]:
                del self._stand_ins[index]
        self._shown.clear()

    def take_down(self) -> None:
        """Before they are reduced: ``.grad`` is what has been reduced before, or None."""
        self.drop_cleared()
        for index, stand_in in self._stand_ins.items():
            sharded = self._parameters[index].sharded
            if sharded.grad is stand_in:
                sharded.grad = None
        self._stand_ins.clear()

    def abandon(self) -> None:
        """Forget all gradients that have not been reduced to the end."""
        self.take_down()
        self.carried = None
        self.unreduced.drop()
        self.unreduced.free()

    def carry(self, piece: torch.Tensor, received: list[int]) -> None:
        """Keep what has been reduced until the sum over the replicas is taken."""
        self.carried = piece, received
        self._show_carried()

    def drop_sharded(self) -> None:
        """Forget what has been reduced."""
        for parameter in self._parameters:
            parameter.sharded.grad = None

    def reduction(self, op: str, requester: str) -> BufferReduction:
        """Over the shard axis, and then of this rank's piece over the replicas."""
        found = self._reductions.get(op)
        if found is None:
            axes = self.axes
            over = AxisSet(axes.mesh, tuple(sorted((axes.shard, *axes.replicate))))
            reduction = Reduction((Stage(over, op),), 1, self.dtype, self.unreduced.buffer.dtype, axes.shard)
            all_reduce = functools.partial(all_reduce_, requester=requester)
            found = self._reductions[op] = BufferReduction(reduction, all_reduce, requester)
        return found

    @functools.cached_property
    def _specs(self) -> list[DTensorSpec]:
        sharded = [parameter.sharded for parameter in self._parameters]
        return [gradient_spec(p, p.placements, self.dtype) for p in sharded if isinstance(p, DTensor)]

    def _changed_by(
        self, hooks: Sequence[Callable[[torch.Tensor], torch.Tensor | None]], part: torch.Tensor, spec: DTensorSpec
    ) -> torch.Tensor:
        """The part of a gradient that the hooks of its parameter return."""
        if not hooks:
            return part
        with torch.no_grad():
            gradient: torch.Tensor = make_dtensor(part.clone(), spec)
            for hook in hooks:
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            if isinstance(gradient, DTensor) and tuple(gradient.placements) != tuple(spec.placements):
                gradient = redistribute(gradient, spec.mesh, spec.placements)
            return local_part(gradient)

    def _part(self, piece: torch.Tensor, index: int) -> torch.Tensor:
        """One parameter's part of this rank's piece."""
        offset, numel, shape = self._slots[index]
        part = piece.narrow(0, offset, numel)
        return part if shape is None else part.view(shape)

    def assign(self, index: int, reduced: torch.Tensor, code: int) -> None:
        """Add one parameter's part of ``reduced``, this rank's piece, to the sharded gradient, as autograd would: after the
        parameter's hooks (``register_hook``), and before those for accumulated gradients. ``code`` tells the axes along
        which it is pending still (:func:`use_code`); 0: as before."""
        parameter = self._parameters[index]
        sharded, contribution = parameter.sharded, parameter.contribution
        if not sharded.requires_grad:
            return
        part, spec = self._part(reduced, index), self._specs[index]
        if code and (code > 1 or contribution.pending):
            contribution.pending = pending_axes(code)
        if contribution.pending:
            pending = {self.axes.resting(axis) for axis in contribution.pending}
            placements = [Partial() if axis in pending else p for axis, p in enumerate(spec.placements)]
            assert isinstance(sharded, DTensor)
            spec = gradient_spec(sharded, placements, self.dtype)
        if sharded._backward_hooks:
            part = self._changed_by(hooks_of_programs(sharded), part, spec)
        sharded.grad = added(sharded.grad, part, spec)
        run_post_accumulate_hooks(sharded)
