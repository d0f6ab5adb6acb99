"""Buffers that a forward writes to: what each forward of a step finds in them, and what ranks have of them afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from vescale.comm import record
from vescale.compat import own_part, set_versions, versions
from vescale.errors import PipelineTraceError
from vescale.pipeline._batches import Signature
from vescale.pipeline._cut import Cut
from vescale.pipeline._schedule import Schedule
from vescale.plans import PipelineEntry


@dataclass(frozen=True)
class WrittenBuffer:
    """A buffer that forwards write to.

    Attributes:
        local: its local tensor.
        before: its values and versions before the step, which every forward finds: each writes the same. None: they
            write one after the other.
        stages: of this rank, that have it.
        writer: the stage around whose modules it is written to; None: a module writes to it. Later stages write to it, too,
            but may not have what it is computed of.
    """

    tensor: torch.Tensor
    local: torch.Tensor
    before: tuple[torch.Tensor, tuple[int, ...]] | None
    stages: frozenset[int]
    writer: int | None

    @contextlib.contextmanager
    def of_forward(self, stage: int, ends_early: bool) -> Iterator[None]:
        """``ends_early``: a forward of all rows together has written what one device does."""
        after: torch.Tensor | None = None
        if self.writer is not None and (
            ends_early or stage < self.writer or (stage > self.writer and self.before is None)
        ):
            after = self.local.clone()
        if self.before is not None and stage in self.stages:
            values, numbers = self.before
            with torch.no_grad():
                self.local.copy_(values)
            # What an earlier forward has saved for backward will have the same values again.
            set_versions((self.tensor, self.local)[: len(numbers)], numbers)
        yield
        if after is not None and not torch.equal(self.local, after):
            with torch.no_grad():
                self.local.copy_(after)
            increment_version(self.tensor)  # for what a backward has saved

    def end_step(self, schedule: Schedule, group: dist.ProcessGroup) -> None:
        """All ranks get what one device has. Communication: a broadcast of what is written around modules."""
        if self.writer is not None:
            source = dist.get_global_rank(group, schedule.rank_of[self.writer])
            with record("broadcast", group.size(), self.local.nbytes, requester="pipeline: a buffer", group=group):
                dist.broadcast(self.local, source, group=group)


def written_buffers(
    model: nn.Module,
    known: Signature,
    before: dict[str, tuple[torch.Tensor, tuple[int, ...]]],
    stages_of: Callable[[str], frozenset[int]],
) -> list[WrittenBuffer]:
    """``before``: values and versions before the step by name, which are added; ``stages_of``: gets the path of a module."""
    found = []
    names = known.loss.alike | known.writers.keys()
    for name, buffer in model.named_buffers() if names else ():
        if name in names:
            local = own_part(buffer)
            values = before.get(name)
            if values is None:
                values = before[name] = local.clone(), versions(buffer)
            stages = stages_of(name.rpartition(".")[0])
            is_alike = name in known.loss.alike or known.num_microbatches == 1
            found.append(WrittenBuffer(buffer, local, values if is_alike else None, stages, known.writers.get(name)))
    return found


@contextlib.contextmanager
def buffers_of_forward(written: Sequence[WrittenBuffer], stage: int, ends_early: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for buffer in written:
            stack.enter_context(buffer.of_forward(stage, ends_early))
        yield


def refuse_assigned(names: Sequence[str], cut: Cut, entry: PipelineEntry) -> None:
    """Raises PlanError for buffers that a forward replaces by others: stages and micro-batches would have their own."""
    apart = entry.microbatches > 1 and entry.rows == "batch"
    for name in names:
        if apart or not name.startswith(tuple(f"{path}." for path in cut.bound)):
            raise PipelineTraceError(
                f"pipeline: the forward assigns the buffer {name!r}; write to it in place, as in "
                f"self.{name.rpartition('.')[2]}.copy_(value)",
                entry.source,
            )
