"""``Reduction``: the gradients of one bucket on their way from every rank's contribution to sharded ``.grad``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from vescale.fsdp._bucket import Bucket
from vescale.fsdp._streams import SideStream

__all__ = ["Reduction", "ReductionOptions"]


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


class Reduction:
    """One bucket's reduction in flight.

    ===========  =====================================================================================================
    step         what is where
    ===========  =====================================================================================================
    ``start``    contributions in ``bucket.unreduced``; the reduce-scatter over the shard axis runs
    ``finish``   this rank's piece is reduced over the replicas, divided, cast, moved to the host when offloaded, and
                 each parameter's part of it is added to ``.grad``; the contributions' memory can be freed
    ``settle``   parameters that got no gradient on this rank, and did on another, get their part
    ===========  =====================================================================================================
    """

    def __init__(
        self, bucket: Bucket, options: ReductionOptions, stream: SideStream, replica_stream: SideStream, requester: str
    ) -> None:
        self.bucket = bucket
        self.options = options
        self.requester = requester
        self._stream, self._replica_stream = stream, replica_stream
        self.received = bucket.unreduced.complete()
        self._reduced: torch.Tensor | None = None
        self.event: Any = None

    @property
    def is_complete_here(self) -> bool:
        """Whether every parameter had a gradient on this rank (or gets zeros)."""
        return self.options.unused_as_zero or all(self.received)

    def start(self) -> None:
        bucket, options = self.bucket, self.options
        axes = bucket.axes
        factor = options.divide_factor
        op, self._divide = options.op, None
        if factor is not None or (options.sum_only and op == "avg"):
            op = "sum"
            ranks = axes.shard_size * axes.num_replicas
            self._divide = factor if factor is not None else float(ranks)
        self._op = op
        self._stream.wait_for_compute()
        with self._stream():
            if bucket.reduce_dtype == torch.float16 and self._divide is not None:
                before = 2.0 ** int(math.log2(max(self._divide, 1)) / 2)  # half of it, to stay in range
                bucket.unreduced.buffer.mul_(1 / before)
                self._divide /= before
            self._pending = bucket.reduce_scatter(
                op, options.group, options.custom_reduce_scatter, self.requester, at_once=options.in_place
            )
            if self._stream.is_real:
                self._pending.wait()
                self.event = self._stream.done()

    def wait(self) -> None:
        """Wait for the collective and leave its result."""
        self._pending.wait()

    def finish(self, carried: Reduction | None) -> bool:
        """Do the rest. ``carried`` is the reduction of earlier backwards, whose sum over the replicas is pending.

        Returns False when this one's stays pending, too; then it is to be carried.
        """
        bucket, options, axes = self.bucket, self.options, self.bucket.axes
        with self._stream(), torch.no_grad():
            piece = self._pending.wait()
            if carried is not None:
                piece.local.add_(carried._pending.buffer.local)
                self.received = [max(pair) for pair in zip(self.received, carried.received, strict=True)]
            if axes.replicate:
                if not options.all_reduce:
                    self.event = self._stream.done()
                    return False
                self._replica_stream.wait_event(self._stream.done())
                with self._replica_stream():
                    piece.all_reduce(axes.replicate, op=self._op, requester=self.requester).wait()
                self._stream.wait_event(self._replica_stream.done())
            if options.hook is not None:
                self._run_hook(piece.local)
            if self._divide is not None:
                piece.mul_(1 / self._divide)
            local = piece.local
            if local.dtype != bucket.dtype:
                local = local.to(bucket.dtype)
            if bucket.shards.device != local.device:
                local = local.to(bucket.shards.device)
            for index, received in enumerate(self.received):
                if received or options.unused_as_zero:
                    bucket.assign(index, local, received)
            self._reduced = local if not self.is_complete_here else None
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
                    self.bucket.assign(index, self._reduced, used)
        self._reduced = None
