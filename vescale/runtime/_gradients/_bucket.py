"""``Bucket``: gradients that are reduced together, in one DBuffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial

from vescale.buffer import DBuffer, TensorGroup
from vescale.comm import Pending, all_reduce_, axis_group, link_of, reduction_cost, ring_bytes
from vescale.compat import foreach_copy_, num_storage_users
from vescale.placements import unpack
from vescale.runtime._gradients._reduction import Arrival, Contribution, Reduction, Stage

__all__ = ["Bucket", "CommHook", "GradientBucket", "Slot", "is_untouched"]


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


class Slot:
    """The place of one gradient in a bucket.

    Attributes:
        name: the parameter's.
        entry: whose gradient it is; opaque here.
        arrival, contribution: how it comes, and what is to be done.
        num_expected: how often it comes in one backward (more than once under reentrant checkpointing).
        gradient: what has come for the running reduction; None: nothing yet.
    """

    def __init__(self, name: str, entry: Any, arrival: Arrival, contribution: Contribution, num_expected: int) -> None:
        self.name, self.entry = name, entry
        self.arrival, self.contribution = arrival, contribution
        self.num_expected = num_expected
        self.strides = torch.empty(contribution.local_shape, device="meta").stride()
        self.num_arrived = 0
        self.gradient: torch.Tensor | None = None
        self.bucket: Bucket | None = None
        self.index = 0

    @property
    def num_bytes(self) -> int:
        assert self.contribution.reduction is not None
        return self.contribution.numel * self.contribution.reduction.reduce_dtype.itemsize


class Bucket:
    """Slots with equal reductions, and the buffer they are reduced in.

    ============  ==================================================================================================
    moment        what the buffer holds
    ============  ==================================================================================================
    closed        results of the last reduction, which gradients are views of, or nothing that anyone sees
    ``open``      contributions; memory that somebody still sees is left to them, and new memory taken
    ``launch``    contributions of all slots, neutral elements for those without; one collective is in flight
    ``advance``   the further collectives are in flight (all-reduce of the scattered piece; axes that have no common group)
    ``finish``    results
    ============  ==================================================================================================

    A slot without contribution on any rank must not become a gradient of zeros: one device would have none. So a slot
    without is filled with -0.0, and the first element of one with is never that: only a sum of nothing but -0.0 is -0.0.

    The buffer of a bucket that is scattered along an axis has one piece for each rank there, with its parts of all slots.
    """

    def __init__(self, index: int, reduction: Reduction, slots: Sequence[Slot]) -> None:
        self.index, self.reduction, self.slots = index, reduction, tuple(slots)
        for place, slot in enumerate(self.slots):
            slot.bucket, slot.index = self, place
        self.is_open = False
        self.is_launched = False
        self.num_missing = sum(slot.num_expected for slot in self.slots)
        self._pending: Pending | None = None
        self._hook: CommHook | None = None
        self._sizes = _piece_sizes(self.slots, reduction.num_pieces)
        self._buffer = self._new_buffer()
        self.num_bytes = self._buffer.num_bytes
        self._cost = reduction_cost(
            self.num_bytes,
            reduction.stages[0].axes.num_ranks,
            reduction.num_pieces,
            link_of(self._buffer.device.type),
        )
        self.scatters = self._cost.scatters
        self._num_users = 0
        self._views: list[list[torch.Tensor]] = []  # for each slot, the parts of its gradient in buffer order
        self._marks: list[list[int]] = []  # for each slot, where its part begins in every piece
        self._all_marks: torch.Tensor | None = None
        self._result = self._buffer.local if self._buffer.is_allocated else None

    @property
    def op(self) -> str:
        return self.reduction.stages[0].op

    @property
    def is_full(self) -> bool:
        return self.num_missing <= 0

    @property
    def asker(self) -> str:
        others = f" with {len(self.slots) - 1} others" if len(self.slots) > 1 else ""
        return f"bucket {self.index}: {self.slots[0].name}.grad: reduced{others}"

    # The buffer

    def _new_buffer(self) -> DBuffer:
        """Contributions: Partial along the first stage's axes, of each rank's own along the others."""
        reduction = self.reduction
        axes = reduction.stages[0].axes
        if reduction.scatter is None:
            shapes = {f"{i} {slot.name}": slot.contribution.local_shape for i, slot in enumerate(self.slots)}
        else:
            shapes = {"pieces": (reduction.num_pieces * max(sum(sizes) for sizes in self._sizes),)}
        group = TensorGroup.plan(
            shapes,
            reduction.num_pieces,
            dtypes=[reduction.reduce_dtype],
            alignment_bytes=reduction.reduce_dtype.itemsize,  # no padding: what is communicated is gradients
        )
        placements = [Partial(self.op) if axis in axes.axes else None for axis in range(axes.mesh.ndim)]
        return DBuffer(group, axes.mesh, placements, dtype=reduction.reduce_dtype)

    def open(self) -> None:
        """Make the buffer ready for contributions."""
        if self.is_open:
            return
        self.is_open = True
        if self._views and num_storage_users(self._buffer.local) > self._num_users:
            self._buffer, self._views = self._buffer.like(), []
        if not self._buffer.is_allocated:
            self._buffer.allocate()
        if not self._views:
            self._make_views()
            self._num_users = num_storage_users(self._buffer.local)

    def _make_views(self) -> None:
        if self.reduction.scatter is None:
            self._views = [[view] for view in self._buffer.views]
            offsets = self._buffer.group.layout.offsets
            self._marks = [[offset] if slot.contribution.numel else [] for offset, slot in zip(offsets, self.slots)]
            return
        local, starts = self._buffer.local, self._starts()
        self._views = [[] for _ in self.slots]
        self._marks = [[] for _ in self.slots]
        for place, slot in enumerate(self.slots):
            assert slot.contribution.pieces is not None
            for piece, start in zip(slot.contribution.pieces, starts[place]):
                if piece.numel:
                    self._marks[place].append(start)
                for box in piece.source:
                    self._views[place].append(local[start : start + box.numel].view(box.sizes))
                    start += box.numel

    def _clear_signs(self, marks: list[int]) -> None:
        """Make -0.0 at ``marks`` 0.0, so that none of these looks like a slot without contribution."""
        if self._all_marks is None:
            every = [mark for own in self._marks for mark in own]
            self._all_marks = torch.tensor(every, dtype=torch.int64, device=self._buffer.device)
        where = self._all_marks
        if len(marks) < len(where):
            where = torch.tensor(marks, dtype=torch.int64, device=self._buffer.device)
        local = self._buffer.local
        local.index_add_(0, where, local.new_zeros(len(where)))

    def _starts(self) -> list[list[int]]:
        """For each slot, where its part begins in each piece."""
        length = self._buffer.numel // self.reduction.num_pieces
        starts: list[list[int]] = [[] for _ in self.slots]
        for number, sizes in enumerate(self._sizes):
            at = number * length
            for place, size in enumerate(sizes):
                starts[place].append(at)
                at += size
        return starts

    def place(self, slot: Slot) -> torch.Tensor | None:
        """Where ``slot``'s gradient may accumulate instead of elsewhere: a new view of the open buffer in the shape of
        the gradient; None when the buffer has another dtype or order."""
        if self.reduction.scatter is not None or self.reduction.dtype != self.reduction.reduce_dtype:
            return None
        self.open()
        return self._views[slot.index][0].view(slot.contribution.local_shape)

    # One reduction

    def arrive(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A contribution that nobody else writes to any more; a second one is added to the first."""
        if slot.gradient is None:
            slot.gradient = gradient
        else:
            slot.gradient.add_(gradient)
        slot.num_arrived += 1
        self.num_missing -= 1

    def launch(self, hook: CommHook | None) -> None:
        """Bring all contributions together and start the first collective; the same on every rank."""
        self.open()
        self.is_launched, self._hook = True, hook
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        marks: list[int] = []
        for place, slot in enumerate(self.slots):
            if slot.gradient is None:
                for view in self._views[place]:
                    view.fill_(_neutral(self.op))
                continue
            marks += self._marks[place]
            parts = [slot.gradient]
            if slot.contribution.pieces is not None:
                parts = [box.view(slot.gradient) for piece in slot.contribution.pieces for box in piece.source]
            for view, part in zip(self._views[place], parts):
                if view.data_ptr() != part.data_ptr() or view.dtype != part.dtype:
                    targets.append(view)
                    sources.append(part)
            slot.gradient = None
        if targets:
            foreach_copy_(targets, sources)
        if self.op == "sum" and marks:
            self._clear_signs(marks)
        if self.scatters and hook is None:
            assert self.reduction.scatter is not None
            scattering = self._buffer.reduce_scatter([self.reduction.scatter], op="sum", asker=self.asker)
            self._pending = Pending(scattering.buffer.local, [scattering])
        else:
            self._pending = self._start(self.reduction.stages[0], self._buffer.local)

    def _start(self, stage: Stage, tensor: torch.Tensor) -> Pending:
        group = stage.axes.group().group
        if self._hook is None:
            return all_reduce_(tensor, stage.op, group, asker=self.asker)
        names = tuple(slot.name for slot in self.slots)
        answer = self._hook(GradientBucket(self.index, names, tensor, group, stage.op))
        return answer if isinstance(answer, Pending) else Pending(answer)

    def advance(self) -> None:
        """Wait for the first collective, and start what follows it."""
        first = self._wait()
        stages = self.reduction.stages
        rest: tuple[int, ...] = ()
        if self.scatters and self._hook is None:
            rest = tuple(axis for axis in stages[0].axes.axes if axis != self.reduction.scatter)
            if rest:
                group = axis_group(stages[0].axes.mesh, rest).group
                self._pending = all_reduce_(first, "sum", group, asker=self.asker)
        for stage in stages[1:]:
            self._pending = self._start(stage, self._wait())
        self._result = first

    def _wait(self) -> torch.Tensor:
        """The result of the collective in flight, where the one before left it."""
        if self._pending is None:
            assert self._result is not None
            return self._result
        found = self._pending.wait()
        self._pending = None
        if self._hook is not None and found.data_ptr() != self._buffer.local.data_ptr():
            self._buffer.local.copy_(found.view(-1))
            found = self._buffer.local
        self._result = found
        return found

    def finish(self) -> None:
        """Wait for the last collective; :meth:`result` is then there, and the bucket is closed."""
        result = self._wait()
        if self.reduction.divisor > 1:
            result.div_(self.reduction.divisor)
        if self.reduction.scatter is not None:
            if not (self.scatters and self._hook is None):
                length = self._buffer.numel // self.reduction.num_pieces
                result = result[self._own * length : (self._own + 1) * length].clone()
            self._buffer.free()  # results live in memory of their own
        if result.dtype != self.reduction.dtype:
            result = result.to(self.reduction.dtype)
        self._result = result

    def result(self, slot: Slot, own_region_shape: tuple[int, ...]) -> torch.Tensor:
        """The reduced gradient: in the shape of the contribution, or this rank's part of it in ``own_region_shape``."""
        assert self._result is not None
        if slot.contribution.pieces is None:
            offset = self._buffer.group.layout.offsets[slot.index] + self._result.storage_offset()
            return self._result.as_strided(slot.contribution.local_shape, slot.strides, offset)
        start = sum(self._sizes[self._own][: slot.index])
        piece = slot.contribution.pieces[self._own]
        flat = self._result[start : start + piece.numel]
        out = flat.view(own_region_shape) if piece.numel == math.prod(own_region_shape) else flat
        if len(piece.target) > 1:
            out = flat.new_empty(own_region_shape)
            unpack(flat, [piece], out)
        return out

    def mark(self, slot: Slot) -> torch.Tensor:
        """One element (or none, of an empty result) that tells whether any rank contributed; see :func:`is_untouched`."""
        assert self._result is not None
        if slot.contribution.pieces is None:
            offset = self._buffer.group.layout.offsets[slot.index]
            return self._result[offset : offset + min(1, slot.contribution.numel)]
        start = sum(self._sizes[self._own][: slot.index])
        return self._result[start : start + min(1, slot.contribution.pieces[self._own].numel)]

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.slots)} gradients, {self.num_bytes} bytes, {self.reduction.text()})"

    def close(self) -> None:
        """Ready for the next reduction; the results belong to the gradients now."""
        self._result = None
        self.is_open = self.is_launched = False
        self.num_missing = sum(slot.num_expected for slot in self.slots)
        for slot in self.slots:
            slot.gradient, slot.num_arrived = None, 0

    @property
    def _own(self) -> int:
        assert self.reduction.scatter is not None
        return axis_group(self.reduction.stages[0].axes.mesh, (self.reduction.scatter,)).index

    # What it costs

    @property
    def num_collectives(self) -> int:
        return self._cost.num_collectives + len(self.reduction.stages) - 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank sends for one reduction, as the ledger counts them."""
        others = self.reduction.stages[1:]
        return self._cost.num_bytes + sum(
            ring_bytes("all_reduce", self.num_bytes, stage.axes.num_ranks) for stage in others
        )


def _piece_sizes(slots: Sequence[Slot], num_pieces: int) -> list[list[int]]:
    """For each piece, the elements of each slot in it."""
    found = []
    for number in range(num_pieces):
        found.append(
            [
                slot.contribution.numel if slot.contribution.pieces is None else slot.contribution.pieces[number].numel
                for slot in slots
            ]
        )
    return found


def _neutral(op: str) -> float:
    """What a slot without contribution is filled with: it changes no reduction, and is recognized when all have it."""
    return {"sum": -0.0, "product": 1.0, "max": -math.inf, "min": math.inf}[op]


def is_untouched(mark: torch.Tensor, op: str) -> torch.Tensor:
    """Whether a slot's first element shows that no rank contributed; a 0-dim bool tensor."""
    value = mark.real if mark.is_complex() else mark
    neutral = _neutral(op)
    return (value == neutral) & torch.signbit(value) if op == "sum" else value == neutral
