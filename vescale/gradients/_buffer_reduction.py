"""``BufferReduction``: the collectives that reduce a buffer of contributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vescale.buffer import DBuffer
from vescale.comm import Pending, reduce_scatter_into
from vescale.gradients._data_parallel_axes import AxisSet
from vescale.gradients._reduction import Reduction, Stage


class BufferReduction:
    """Carries out one :class:`Reduction`, again and again: of a bucket, and of a buffer of sharded parameters.

    ===========  ======================================================================================================
    ``scatter``  a reduce-scatter along ``reduction.scatter`` runs, to this rank's piece, in new memory
    ``start``    or: an all-reduce over all axes of the first stage runs, in place
    ``advance``  once: waits for the first collective, and starts those that follow: the all-reduce of the piece over the
                 other axes of the stage, further stages
    ``finish``   returns what the last one has left: the reduced piece, or the whole; not divided
    ===========  ======================================================================================================

    Args:
        reduction: axes and ops.
        all_reduce: reduces a tensor in place by an op over a group.
        requester: of the reduce-scatter, for the ledger of collectives.
    """

    def __init__(
        self,
        reduction: Reduction,
        all_reduce: Callable[[torch.Tensor, str, dist.ProcessGroup], Pending],
        requester: str,
    ) -> None:
        self.reduction, self._all_reduce, self._requester = reduction, all_reduce, requester
        self._groups: dict[int, dist.ProcessGroup] = {}  # by id of the stage, created on first use
        self._pending: Pending | None = None
        self._following: tuple[Stage, ...] = ()
        first = reduction.stages[0]
        others = tuple(axis for axis in first.axes.axes if axis != reduction.scatter)
        rest = (Stage(AxisSet(first.axes.mesh, others), first.op),) if others else ()
        self._after_scatter = rest + reduction.stages[1:]

    def scatter(
        self,
        contributions: DBuffer,
        *,
        group: dist.ProcessGroup | None = None,
        at_once: bool = False,
        collective: Callable[..., Pending] = reduce_scatter_into,
    ) -> None:
        """Arguments as for :meth:`DBuffer.reduce_scatter`."""
        assert self.reduction.scatter is not None
        pending = contributions.reduce_scatter(
            (self.reduction.scatter,),
            op=self.reduction.stages[0].op,
            process_group=group,
            at_once=at_once,
            collective=collective,
            requester=self._requester,
        )
        self._pending = Pending(pending.buffer.local, [pending])
        self._following = self._after_scatter

    def start(self, contributions: torch.Tensor) -> None:
        self._reduce(contributions, self.reduction.stages[0])
        self._following = self.reduction.stages[1:]

    def _reduce(self, tensor: torch.Tensor, stage: Stage) -> None:
        group = self._groups.get(id(stage))
        if group is None:
            group = self._groups[id(stage)] = stage.axes.group().group
        self._pending = self._all_reduce(tensor, stage.op, group)

    def advance(self) -> None:
        following, self._following = self._following, ()
        for stage in following:
            self._reduce(self.wait(), stage)

    def wait(self) -> torch.Tensor:
        """Wait for the collective in flight, and return its result."""
        assert self._pending is not None
        return self._pending.wait()

    def abandon(self) -> None:
        """Wait for the collective in flight, if there is one, and forget it."""
        pending, self._pending, self._following = self._pending, None, ()
        if pending is not None:
            pending.wait()

    def finish(self) -> torch.Tensor:
        self.advance()
        reduced, self._pending = self.wait(), None
        return reduced


# Marks of gradients in a reduced bucket that no rank has contributed to.
#
# A gradient without contributions must be None, as on one device, and not zeros. A slot without a contribution is
# therefore filled with an element that changes no reduction and that no contribution starts with. For a sum this is
# -0.0, because a sum is -0.0 only if every summand is. A slot that is empty on this rank has one extra element for
# this purpose, because all ranks must agree on whether a parameter has a gradient.


def neutral(op: str) -> float:
    """The element that a slot without a contribution is filled with."""
    return {"sum": -0.0, "product": 1.0, "max": -math.inf, "min": math.inf}[op]


def is_unused(mark: torch.Tensor, op: str) -> torch.Tensor:
    """Whether a slot's first element shows that no rank contributed; a bool tensor in the shape of ``mark``."""
    value = mark.real if mark.is_complex() else mark
    filled = neutral(op)
    return (value == filled) & torch.signbit(value) if op == "sum" else value == filled


def clear_signs(flat: torch.Tensor, marks: Sequence[int]) -> None:
    """Replace -0.0 at the indices ``marks`` by 0.0, so that none of these slots looks unused."""
    where = torch.tensor(marks, dtype=torch.int64, device=flat.device)
    flat.index_add_(0, where, flat.new_zeros(len(where)))
