"""``ShardedGradients``: gradients of parameters that are sharded together, from every rank's to this rank's part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor, Partial

from vescale.buffer import DBuffer
from vescale.comm import all_reduce_
from vescale.compat import DTensorSpec, make_dtensor, run_gradient_hooks, run_post_accumulate_hooks
from vescale.gradients._axis_sets import AxisSet
from vescale.gradients._buffer_reduction import BufferReduction
from vescale.gradients._complete_gradient import added, gradient_spec, local_part
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._local_contribution import pending_axes
from vescale.gradients._reduction import Reduction, Stage
from vescale.gradients._unreduced_gradients import GatheredParameter, UnreducedGradients
from vescale.placements import redistribute

__all__ = ["ShardedGradients"]


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
        self.carried: tuple[torch.Tensor, list[int]] | None = None
        """What earlier backwards have reduced, and received, whose sum over the replicas is pending."""

    def abandon(self) -> None:
        """Forget all gradients that have not been reduced to the end."""
        self.carried = None
        self.unreduced.drop()
        self.unreduced.free()

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

    def assign(self, index: int, reduced: torch.Tensor, code: int) -> None:
        """Add one parameter's part of ``reduced``, this rank's piece, to the sharded gradient, as autograd would: after the
        parameter's hooks (``register_hook``), and before those for accumulated gradients. ``code`` tells the axes along which
        it is pending still (:func:`use_code`); 0: as before."""
        parameter = self._parameters[index]
        sharded, contribution = parameter.sharded, parameter.contribution
        if not sharded.requires_grad:
            return
        (offset, numel, shape), spec = self._slots[index], self._specs[index]
        part = reduced.narrow(0, offset, numel)
        part = part if shape is None else part.view(shape)
        if code and (code > 1 or contribution.pending):
            contribution.pending = pending_axes(code)
        if contribution.pending:
            pending = {self.axes.resting(axis) for axis in contribution.pending}
            placements = [Partial() if axis in pending else p for axis, p in enumerate(spec.placements)]
            assert isinstance(sharded, DTensor)
            spec = gradient_spec(sharded, placements, self.dtype)
        if sharded._backward_hooks:
            with torch.no_grad():
                gradient = run_gradient_hooks(sharded, make_dtensor(part.clone(), spec))
                if isinstance(gradient, DTensor) and tuple(gradient.placements) != tuple(spec.placements):
                    gradient = redistribute(gradient, spec.mesh, spec.placements)
                part = local_part(gradient)
        sharded.grad = added(sharded.grad, part, spec)
        run_post_accumulate_hooks(sharded)
