"""``ShardedReduction``: gradients of a bucket on their way from every rank's contribution to sharded ``.grad``."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import Placement

from vescale.buffer import DBuffer
from vescale.comm import Pending, SideStream, all_reduce_, reduce_scatter_into
from vescale.compat import (
    DTensorSpec,
    ParameterRow,
    make_dtensor,
    note,
    permit_gradients_of_any_dtype,
    run_post_accumulate_hooks,
)
from vescale.errors import OrderMismatchError
from vescale.gradients._arrival_hooks import hooks_of_programs, refuse_hooked_nodes
from vescale.gradients._buffer_reduction import BufferReduction
from vescale.gradients._collective_order import CollectiveOrder, OrderedUnit
from vescale.gradients._complete_gradient import add_contribution, added, gradient_spec, local_part
from vescale.gradients._data_parallel_axes import AxisSet, DataParallelAxes
from vescale.gradients._parameter import pending_axes
from vescale.gradients._reduction import Reduction, Stage, divide_
from vescale.gradients._unreduced_gradients import GatheredParameter, UnreducedGradients
from vescale.placements import redistribute

# ``ShardedGradients``: gradients of parameters that are sharded together, from every rank's to this rank's part.

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
        self._sharded = ParameterRow(())  # as of the last reduction
        self._reductions: dict[str, BufferReduction] = {}
        self._shown: set[int] = set()
        self._stand_ins: dict[int, torch.Tensor] = {}
        self.carried: tuple[torch.Tensor, list[int]] | None = None
        """What earlier backwards have reduced, and received, whose sum over the replicas is pending."""

    # Between backwards that do not reduce to the end

    def show_unreduced(self) -> None:
        """Until they are reduced, gradients that backwards have left are ``.grad`` of the sharded parameters: DTensors that
        are pending over the ranks, in the memory where more is added. Who clears them, or reads them, does so to what this
        step has accumulated: a ``.grad`` that has been reduced already is added to this rank's contribution. It stays where
        the parameter has hooks, which have run for it; clearing it clears both."""
        if self.unreduced.has_any:
            note("gradients._sharded_reduction:instance", self)
            pending = {self.axes.shard, *self.axes.replicate}
            for index in range(len(self._parameters)):
                if self._show(index, self.unreduced.shown(index), pending):
                    self.unreduced.keep(index)

    def _show_carried(self) -> None:
        """The same for what only waits for the sum over the replicas."""
        if self.carried is not None:
            for index, received in enumerate(self.carried[1]):
                if received:
                    self._show(index, self._part(self.carried[0], index), set(self.axes.replicate))

    def _show(self, index: int, local: torch.Tensor, pending: set[int]) -> bool:
        """Whether a gradient that had been reduced was added to ``local``."""
        parameter = self._parameters[index]
        sharded, op = parameter.sharded, "sum" if self.unreduced.are_of_one_loss else "avg"
        assert isinstance(sharded, DTensor)
        if (
            not sharded.requires_grad or sharded.device.type != local.device.type
        ):  # offloaded: PyTorch keeps it out of .grad
            return False
        earlier, is_added = sharded.grad, False
        if earlier is None or (index not in self._stand_ins and not hooks_of_programs(sharded)):
            also = {self.axes.resting(axis) for axis in parameter.contribution.pending}
            placements: list[Placement] = list(sharded.placements)
            for axis in pending | also:
                placements[axis] = Partial("sum" if axis in also else op)
            spec = gradient_spec(sharded, placements, local.dtype)
            if earlier is None or (isinstance(earlier, DTensor) and add_contribution(local, spec, earlier)):
                if local.dtype != sharded.dtype:
                    permit_gradients_of_any_dtype(sharded)
                sharded.grad = self._stand_ins[index] = make_dtensor(local, spec)
                is_added = earlier is not None
        setattr(sharded.grad, _COUNTS_WITH_UNREDUCED, True)
        self._shown.add(index)
        return is_added

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

    def refuse_hooked_nodes(self) -> None:
        """See :func:`refuse_hooked_nodes`. Graphs of forwards have the gathered parameters."""
        self._sharded.tensors = [parameter.sharded for parameter in self._parameters]
        refuse_hooked_nodes(self._sharded, (parameter.name for parameter in self._parameters), before=True)

    def abandon(self, *, frees: bool) -> None:
        """Forget all gradients that have not been reduced to the end. Not ``frees``: something may still use their memory,
        and the caller drops it."""
        self.take_down()
        self.carried = None
        self.unreduced.abandon()
        if frees:
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


@dataclass
class ReductionOptions:
    """How a group's gradients are reduced; set through :class:`FSDPModule`'s methods.

    Attributes:
        op: ``avg`` over the data-parallel ranks, or ``sum`` where gradients are contributions to one global loss.
        divide_factor: divide the sum by this instead.
        sum_only: communicate sums and divide afterwards, for backends that are faster at that.
        all_reduce: False leaves the sum over replicas pending (accumulation over several backwards).
        in_place: gradients may take their parameters' place.
        unused_as_zero: a parameter without a gradient gets zeros; otherwise None, unless some rank has one.
        hook: gets the reduced, flat piece of each bucket, before it is cast to the parameters' dtype.
        hook_stream: where the hook runs.
        group: another process group for the reduce-scatter than for the all-gather.
        custom_reduce_scatter: called instead of the collective.
    """

    op: str = "avg"
    divide_factor: float | None = None
    sum_only: bool = False
    all_reduce: bool = True
    in_place: bool = False
    unused_as_zero: bool = False
    hook: Callable[[torch.Tensor], None] | None = None
    hook_stream: Any = None
    group: dist.ProcessGroup | None = None
    custom_reduce_scatter: Any = None


class ShardedReduction:
    """One bucket's reduction in flight.

    ===========  =====================================================================================================
    step         what is where
    ===========  =====================================================================================================
    ``start``    contributions in ``gradients.unreduced``; the reduce-scatter over the shard axis runs
    ``finish``   this rank's piece is reduced over the replicas, divided, cast, and on its way to the host when offloaded
    ``free``     the current stream waits for all that, and the contributions' memory can be freed
    ``deliver``  each parameter's part of the piece is added to ``.grad``; hooks of parameters run
    ``settle``   parameters that got no gradient on this rank, and did on another, get their part
    ===========  =====================================================================================================

    The first two run on the streams that are given, the others on the current one, which is the optimizer's.
    """

    def __init__(
        self,
        gradients: ShardedGradients,
        options: ReductionOptions,
        stream: SideStream,
        replica_stream: SideStream,
        requester: str,
        unit: OrderedUnit,
        first_flag: int,
    ) -> None:
        self.gradients, self.options, self.requester = gradients, options, requester
        self.unit, self.first_flag = unit, first_flag
        self._stream, self._replica_stream = stream, replica_stream
        gradients.refuse_hooked_nodes()
        gradients.take_down()
        self.received = gradients.unreduced.complete()
        self._reduced: torch.Tensor | None = None
        self._is_delivered = False
        self._running: BufferReduction | None = None
        self.event: Any = None

    @property
    def is_on_host(self) -> bool:
        """Whether the reduced gradients are copied there, for which somebody must wait."""
        return self.gradients.device.type != self.gradients.unreduced.buffer.device.type

    def start(self) -> None:
        gradients, options, axes = self.gradients, self.options, self.gradients.axes
        self._op, self._divisor = options.op, options.divide_factor
        if self._divisor is None and options.sum_only and options.op == "avg":
            self._divisor = float(axes.shard_size * axes.num_replicas)
        if self._divisor is not None:
            self._op = "sum"
        gradients.unreduced.memory.lend(self._stream.compute_waits)
        self._stream.wait_for_compute()
        with self._stream():
            if gradients.unreduced.buffer.dtype == torch.float16 and self._divisor is not None:
                before = 2.0 ** int(math.log2(max(self._divisor, 1)) / 2)  # half of it, to stay in range
                gradients.unreduced.buffer.mul_(1 / before)
                self._divisor /= before
            custom = options.custom_reduce_scatter
            self._running = gradients.reduction(self._op, self.requester)
            self._running.scatter(
                gradients.to_exchange(gradients.unreduced.buffer),
                group=options.group,
                at_once=options.in_place,
                collective=reduce_scatter_into if custom is None else functools.partial(_call, custom),
            )
            if self._stream.is_real:
                self._running.wait()
                self.event = self._stream.done()

    def abandon(self) -> None:
        """Wait for the collective in flight and forget its result."""
        if self._running is not None:
            self._running.abandon()
        self._stream.compute_waits(self._stream.done())
        self.gradients.unreduced.memory.give_back(None)
        self._is_delivered, self._reduced = True, None

    def free(self) -> None:
        """The current stream waits for the reduction; free the memory of contributions that was not the parameters'."""
        self._stream.compute_waits(self.event)
        self.gradients.unreduced.memory.give_back(self.event)
        self.gradients.unreduced.free()

    def finish(self) -> bool:
        """Do the rest; False where the sum over the replicas stays pending, for a later one to finish."""
        gradients, options, axes = self.gradients, self.options, self.gradients.axes
        assert self._running is not None
        with self._stream(), torch.no_grad():
            piece = self._running.wait()
            if gradients.carried is not None:
                earlier, received = gradients.carried
                piece.add_(earlier)
                self.received = [max(pair) for pair in zip(self.received, received, strict=True)]
                gradients.carried = None
            if axes.replicate and not options.all_reduce:
                gradients.carry(piece, self.received)
                self.event = self._stream.done()
                return False
            self._replica_stream.wait_event(self._stream.done())
            with self._replica_stream():
                piece = self._running.finish()
            self._stream.wait_event(self._replica_stream.done())
            if options.hook is not None:
                self._run_hook(piece)
            if self._divisor is not None:
                divide_(piece, self._divisor)
            self._reduced = piece.to(gradients.device, gradients.dtype, non_blocking=True)
            self.event = self._stream.done()
        return True

    def deliver(self) -> None:
        """Add each parameter's part to its ``.grad``, once. The current stream has waited; for a part on the host the caller
        does now."""
        if self._reduced is None or self._is_delivered:
            return
        if self._stream.is_real and self.is_on_host:
            self._stream.host_waits(self.event)
        self._is_delivered, unused_as_zero = True, self.options.unused_as_zero
        with torch.no_grad():
            for index, code in enumerate(self.received):
                if code or unused_as_zero:
                    self.gradients.assign(index, self._reduced, code)
        if all(self.received) or unused_as_zero:
            self._reduced = None

    def _run_hook(self, reduced: torch.Tensor) -> None:
        assert self.options.hook is not None
        stream = self.options.hook_stream
        if stream is None or not self._stream.is_real:
            self.options.hook(reduced)
            return
        stream.wait_event(self._stream.done())
        with torch.get_device_module(reduced.device.type).stream(stream):
            self.options.hook(reduced)
        self._stream.wait_event(stream.record_event())

    @property
    def lacks_gradients(self) -> bool:
        """Whether this rank has to know what others have received."""
        return self._reduced is not None

    def settle(self, received_anywhere: list[int]) -> None:
        """Give parameters without a gradient on this rank what other ranks contributed, as they have received it."""
        if self._reduced is None:
            return
        with torch.no_grad():
            for index, (received, used) in enumerate(zip(self.received, received_anywhere, strict=True)):
                if used and not received:
                    self.gradients.assign(index, self._reduced, used)
        self._reduced = None


def _call(custom: Any, out: torch.Tensor, send: torch.Tensor, op: str, group: dist.ProcessGroup, **_: Any) -> Pending:
    """A reduce-scatter of the user's; see :meth:`FSDPModule.set_custom_reduce_scatter`."""
    how = dist.ReduceOp.AVG if op == "avg" else dist.ReduceOp.SUM
    return Pending(out, [custom(output_tensor=out, input_tensor=send, group=group, op=how, async_op=True)])


def reduce_unused(reductions: Sequence[ShardedReduction]) -> None:
    """After a backward: parameters that this rank did not use (an expert without tokens, a branch not taken) get the
    gradient of the ranks that did; those that no rank used keep ``grad`` as it is, None for a fresh one.

    One all-reduce of a byte for each parameter and backward, over the ranks of the groups; every rank takes part. Only ranks
    that lack gradients wait for it, and all of them in the first backwards, because digests of what the ranks have gathered
    and reduced go with it (:class:`vescale.agreement.Heartbeat`).

    Raises OrderMismatchError on every rank if these differ, in this backward if it is one of the first, or in the one
    before, and drops the gradients: they are, or follow, sums of different parameters.
    """
    together: dict[CollectiveOrder, list[ShardedReduction]] = defaultdict(list)
    for reduction in reductions:
        if reduction.gradients.axes.data_parallel.size > 1:
            together[reduction.unit.order].append(reduction)
    error: OrderMismatchError | None = None
    for order, members in together.items():
        flags: dict[int, list[int]] = {}
        for r in members:
            if not r.options.unused_as_zero:  # a bucket is reduced several times with reentrant checkpointing
                earlier = flags.get(r.first_flag, r.received)
                flags[r.first_flag] = [max(pair) for pair in zip(earlier, r.received, strict=True)]
        device = members[0].gradients.unreduced.buffer.device
        try:
            beat = order.send(flags, device)
        except OrderMismatchError as found:
            error = found  # other ranks take part in the collectives of the other orders
            continue
        for reduction in members:
            if reduction.lacks_gradients:
                start = order.header_bytes + reduction.first_flag
                reduction.settle(beat.answer()[start : start + len(reduction.received)])
    if error is not None:
        for reduction in reductions:
            reduction.gradients.drop_sharded()
        raise error
