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

from vescale.comm import Pending, SideStream, all_reduce_, reduce_scatter_into
from vescale.gradients._collective_order import CollectiveOrder, OrderedUnit
from vescale.gradients._order_mismatch import OrderMismatchError
from vescale.gradients._reduction import divide_
from vescale.gradients._sharded_gradients import ShardedGradients

__all__ = ["FLAGS_REQUESTER", "ReductionOptions", "ShardedReduction", "reduce_unused"]

FLAGS_REQUESTER = "which parameters got a gradient"
"""Of the collective with a byte for each parameter of the units along an axis."""


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
    ``finish``   this rank's piece is reduced over the replicas, divided, cast, moved to the host when offloaded, and
                 each parameter's part of it is added to ``.grad``; the contributions' memory can be freed
    ``settle``   parameters that got no gradient on this rank, and did on another, get their part
    ===========  =====================================================================================================
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
        gradients.take_down()
        self.received = gradients.unreduced.complete()
        self._reduced: torch.Tensor | None = None
        self.event: Any = None

    def start(self) -> None:
        gradients, options, axes = self.gradients, self.options, self.gradients.axes
        self._op, self._divisor = options.op, options.divide_factor
        if self._divisor is None and options.sum_only and options.op == "avg":
            self._divisor = float(axes.shard_size * axes.num_replicas)
        if self._divisor is not None:
            self._op = "sum"
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

    def wait(self) -> None:
        """Wait for the collective and leave its result."""
        self._running.wait()

    def finish(self) -> bool:
        """Do the rest; False where the sum over the replicas stays pending, for a later one to finish."""
        gradients, options, axes = self.gradients, self.options, self.gradients.axes
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
            local = piece.to(gradients.device, gradients.dtype)
            for index, code in enumerate(self.received):
                if code or options.unused_as_zero:
                    gradients.assign(index, local, code)
            if not all(self.received) and not options.unused_as_zero:
                self._reduced = local
            self.event = self._stream.done()
        return True

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

    def settle(self, received_anywhere: list[int]) -> None:
        """Give parameters without a gradient on this rank what other ranks contributed, as they have received it."""
        if self._reduced is None:
            return
        with self._stream(), torch.no_grad():
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

    One all-reduce of a byte for each parameter and backward, over the ranks of the groups; every rank takes part, and waits
    for it, because digests of what the ranks have gathered and reduced go with it.

    Raises OrderMismatchError on every rank if these differ, and drops the gradients: they are sums of different parameters.
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
        own = torch.frombuffer(order.message(flags), dtype=torch.uint8).to(device)
        group = members[0].gradients.axes.data_parallel.group
        order.begins_to_check()
        answer = all_reduce_(own, "max", group, requester=FLAGS_REQUESTER).wait().tolist()
        try:
            order.check(answer)
        except OrderMismatchError as found:
            error = found  # other ranks take part in the collectives of the other orders
            continue
        for reduction in members:
            start = order.header_bytes + reduction.first_flag
            reduction.settle(answer[start : start + len(reduction.received)])
    if error is not None:
        for reduction in reductions:
            reduction.gradients.drop_sharded()
        raise error
