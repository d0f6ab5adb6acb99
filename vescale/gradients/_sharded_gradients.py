"""``ShardedGradients``: gradients of parameters that are sharded together, from every rank's to this rank's part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import Allocation, DBuffer, PendingBuffer, TensorGroup
from vescale.comm import Pending
from vescale.compat import DTensorSpec, local_of, make_dtensor, make_spec, run_post_accumulate_hooks, spec_of
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._local_contribution import pending_axes
from vescale.gradients._unreduced_gradients import GatheredParameter, GradientPlace, UnreducedGradients
from vescale.placements import RaggedShard, redistribute

__all__ = ["GradientLayout", "ShardedGradients", "ShardedParameter"]


class ShardedParameter(GatheredParameter, Protocol):
    """A parameter with a sharded form, which gets the gradient."""

    sharded: nn.Parameter
    global_shape: tuple[int, ...]

    def sharded_spec(self, cut: Placement, dtype: torch.dtype) -> DTensorSpec: ...


class GradientLayout(Protocol):
    """Which part of each gradient a rank gets, and where it is in a piece of the buffer that is reduced."""

    @property
    def parameters(self) -> Sequence[ShardedParameter]: ...

    @property
    def axes(self) -> DataParallelAxes: ...

    @property
    def whole(self) -> TensorGroup:
        """The buffer of whole gradients."""

    @property
    def exchanged(self) -> TensorGroup:
        """The buffer that is reduced."""

    @property
    def slots(self) -> list[tuple[int, int, tuple[int, ...] | None]]:
        """(offset, elements, shape unless it is flat) of each gradient's part in this rank's piece."""

    def placement(self, index: int) -> Placement:
        """Of the part, along the shard axis."""

    def copy_to_exchange(self, whole: DBuffer, exchanged: DBuffer) -> None:
        """Not called where the two are the same buffer."""


class ShardedGradients:
    """Contributions, and what becomes of them.

    Args:
        dtype, device: of the sharded gradients.
        reduce_dtype: of the reduction.
    """

    def __init__(
        self, layout: GradientLayout, dtype: torch.dtype, reduce_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.axes = layout, layout.axes
        self.dtype, self.reduce_dtype, self.device = dtype, reduce_dtype, device
        self.unreduced = UnreducedGradients(layout.parameters)
        self._geometry: dict[str, DBuffer] = {}
        self.carried: tuple[DBuffer, list[int]] | None = None
        """What earlier backwards have reduced, and received, whose sum over the replicas is pending."""

    def prepare(self, whole: DBuffer | None, memory: Allocation, op: str, begin: Callable[[], GradientPlace]) -> None:
        """See :meth:`UnreducedGradients.prepare`; ``memory`` is for gradients that do not take the place of parameters."""
        placements = self.axes.unreduced(op)
        apart = DBuffer(self.layout.whole, self.axes.mesh, placements, dtype=self.reduce_dtype, allocation=memory)
        self.unreduced.prepare(whole, apart, of_one_loss=op == "sum", begin=begin)

    def abandon(self) -> None:
        """Forget all gradients that have not been reduced to the end."""
        self.carried = None
        self.unreduced.drop()
        self.unreduced.free()

    def reduce_scatter(
        self, op: str, group: dist.ProcessGroup | None, custom: Any, requester: str, *, at_once: bool
    ) -> PendingBuffer:
        """Start to reduce :attr:`unreduced` gradients, which are complete, over the shard axis, in a piece of new memory."""
        axes, gradients = self.axes, self.unreduced.buffer
        if self.layout.exchanged is not self.layout.whole:
            exchange = self._new("exchange " + op, axes.unreduced(op))
            self.layout.copy_to_exchange(gradients, exchange)
            gradients = exchange
        piece = self._new("piece " + op, axes.buffer_placements(RaggedShard(), Partial(op)))
        if custom is None:
            shard = (axes.shard,)
            return gradients.reduce_scatter(
                shard, op=op, out=piece, process_group=group, at_once=at_once, requester=requester
            )
        group = group or axes.mesh.get_group(axes.shard)
        how = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
        work = custom(output_tensor=piece.local, input_tensor=gradients.local, group=group, op=how, async_op=True)
        return PendingBuffer(piece, Pending(piece.local, [work]))

    def _new(self, what: str, placements: Sequence[Placement | None]) -> DBuffer:
        """Memory for gradients on their way."""
        geometry = self._geometry.get(what)
        if geometry is None:
            group, mesh, device = self.layout.exchanged, self.axes.mesh, self.unreduced.buffer.device
            geometry = DBuffer(group, mesh, placements, dtype=self.reduce_dtype, device=device)
            self._geometry[what] = geometry
        return geometry.fresh()

    @cached_property
    def _specs(self) -> list[DTensorSpec]:
        """The parameters' own objects: an optimizer's ops then find equal specs by identity."""
        found = []
        for index, parameter in enumerate(self.layout.parameters):
            spec, sharded = parameter.sharded_spec(self.layout.placement(index), self.dtype), parameter.sharded
            own = spec_of(sharded) if isinstance(sharded, DTensor) else None
            found.append(own if own == spec else spec)
        return found

    def assign(self, index: int, reduced: torch.Tensor, code: int) -> None:
        """Add one parameter's part of ``reduced``, this rank's piece, to the sharded gradient. ``code`` tells the axes along
        which it is pending still (:func:`use_code`); 0: as before."""
        parameter = self.layout.parameters[index]
        sharded, contribution = parameter.sharded, parameter.contribution
        if not sharded.requires_grad:
            return
        (offset, numel, shape), spec = self.layout.slots[index], self._specs[index]
        part = reduced.narrow(0, offset, numel)
        part = part if shape is None else part.view(shape)
        if code and (code > 1 or contribution.pending):
            contribution.pending = pending_axes(code)
        if contribution.pending:
            pending = {self.axes.resting(axis) for axis in contribution.pending}
            placements = [Partial() if axis in pending else p for axis, p in enumerate(spec.placements)]
            spec = make_spec(spec.mesh, placements, parameter.global_shape, spec.stride, self.dtype)
        accumulated = sharded.grad
        if accumulated is None:
            sharded.grad = make_dtensor(part, spec)
        elif not isinstance(accumulated, DTensor):
            accumulated.add_(part)
        else:
            if accumulated.placements != spec.placements:  # autograd's, of a loss that read the sharded parameter
                accumulated = sharded.grad = redistribute(accumulated, spec.mesh, spec.placements)
            local_of(accumulated).add_(part)
        run_post_accumulate_hooks(sharded)
