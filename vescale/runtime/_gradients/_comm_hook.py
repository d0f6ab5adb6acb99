"""What replaces the all-reduce of a bucket, to compress it for example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vescale.comm import Pending, all_reduce_

__all__ = ["CommHook", "GradientBucket"]


@dataclass(frozen=True)
class GradientBucket:
    """What a communication hook is given: one full bucket, one process group.

    Attributes:
        index: the bucket's place in the schedule.
        names: of the parameters, in the order of their gradients' arrival.
        buffer: this rank's contributions, flat; the hook may write to it.
        group: the ranks to reduce over.
        op: ``sum``, ``max``, ``min`` or ``product``. Averages are sums here; they are divided afterwards.
    """

    index: int
    names: tuple[str, ...]
    buffer: torch.Tensor
    group: dist.ProcessGroup
    op: str

    def all_reduce(self, tensor: torch.Tensor | None = None) -> Pending:
        """Reduce ``tensor`` (None: ``buffer``) in place over the group: what is done without a hook."""
        return all_reduce_(self.buffer if tensor is None else tensor, self.op, self.group, asker=f"bucket {self.index}")


CommHook = Callable[[GradientBucket], "Pending | torch.Tensor"]
