"""Communication hooks, which replace the all-reduce of a bucket, for example to compress it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.comm import Pending, all_reduce_
from vescale.errors import ArgumentTypeError, GradientError, kind_of


@dataclass(frozen=True)
class GradientBucket:
    """The argument of a communication hook: one full bucket and one process group.

    Attributes:
        index: position of the bucket in the schedule.
        names: names of the parameters, in the order in which their gradients arrive.
        buffer: this rank's contributions, flat; the hook may write to it.
        group: the ranks to reduce over.
        op: ``sum``, ``max``, ``min`` or ``product``. Averages are communicated as sums and divided afterwards.
    """

    index: int
    names: tuple[str, ...]
    buffer: torch.Tensor
    group: dist.ProcessGroup
    op: str

    def all_reduce(self, tensor: torch.Tensor | None = None) -> Pending:
        """Reduce ``tensor`` (None: ``buffer``) in place over the group, as the reducer does without a hook."""
        return all_reduce_(
            self.buffer if tensor is None else tensor, self.op, self.group, requester=f"bucket {self.index}"
        )


CommHook = Callable[[GradientBucket], "Pending | torch.Tensor"]


def call_hook(hook: CommHook, bucket: GradientBucket) -> Pending:
    """Call the hook; what it returns is then copied to the buffer. Raises TypeError and ValueError if that cannot be."""
    answer = hook(bucket)
    pending = Pending(answer) if isinstance(answer, torch.Tensor) else answer
    name = (
        f"the communication hook of bucket {bucket.index} ({bucket.names[0]}.grad and {len(bucket.names) - 1} others)"
    )
    if not isinstance(pending, Pending):
        raise ArgumentTypeError(
            f"{name} returned {kind_of(answer)}; return the reduced tensor, or a vescale.comm.Pending of it: "
            "Pending(tensor, [work]), if a torch.distributed work must be waited for"
        )
    if pending.out.numel() != bucket.buffer.numel():
        raise GradientError(
            f"{name} returned a tensor of shape {tuple(pending.out.shape)}; return one of the buffer's "
            f"{bucket.buffer.numel()} elements"
        )
    buffer = bucket.buffer

    def copy_back() -> None:
        found = pending.out
        if found.data_ptr() != buffer.data_ptr() or found.dtype != buffer.dtype:
            buffer.copy_(found.view(-1))

    return Pending(buffer, [pending], copy_back)
