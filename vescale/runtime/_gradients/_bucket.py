"""``Bucket``: gradients that are reduced together, in one DBuffer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial

from vescale.buffer import DBuffer, TensorGroup
from vescale.comm import Pending, all_reduce_, axis_group, link_of, reduction_cost, ring_bytes
from vescale.compat import foreach_copy_, foreach_scale_, num_storage_users
from vescale.placements import unpack
from vescale.runtime._gradients._comm_hook import CommHook, GradientBucket
from vescale.runtime._gradients._reduction import Arrival, Contribution, Reduction, Stage
from vescale.runtime._gradients._untouched import clear_signs, neutral

__all__ = ["Bucket", "Slot"]

_LARGE_BYTES = 2**16
"""From here on a gradient on the CPU is copied when it comes, while it is in the cache; smaller ones cost less together."""


class Slot:
    """The place of one gradient in a bucket.

    Attributes:
        name: the parameter's.
        entry: whose gradient it is; opaque here.
        arrival, contribution: how it comes, and what is to be done.
        num_expected: how often it comes in one backward (more than once under reentrant checkpointing).
        gradient: what has come for the running reduction; None: nothing yet.
        scale: what ``gradient`` has been multiplied by already.
        bucket, index: where the place is.
    """

    bucket: Bucket
    index: int

    def __init__(self, name: str, entry: Any, arrival: Arrival, contribution: Contribution, num_expected: int) -> None:
        self.name, self.entry = name, entry
        self.arrival, self.contribution = arrival, contribution
        self.num_expected = num_expected
        self.strides = torch.empty(contribution.local_shape, device="meta").stride()
        self.num_arrived = 0
        self.gradient: torch.Tensor | None = None
        self.scale = 1.0

    @property
    def reduction(self) -> Reduction:
        assert self.contribution.reduction is not None
        return self.contribution.reduction

    @property
    def num_bytes(self) -> int:
        return self.contribution.numel * self.reduction.reduce_dtype.itemsize


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

    The buffer of a bucket that is scattered along an axis has one piece for each rank there, with its parts of all slots.

    Nothing is copied into the bucket of one gradient that nobody else sees: it is reduced where it is.

    An average is a sum that is divided: before, where that is exact and a large gradient is copied anyway, else after.
    """

    def __init__(self, index: int, reduction: Reduction, slots: Sequence[Slot], hook: CommHook | None = None) -> None:
        self.index, self.reduction, self.slots = index, reduction, tuple(slots)
        self.hook = hook
        for place, slot in enumerate(self.slots):
            slot.bucket, slot.index = self, place
        self.is_open = False
        self.is_launched = False
        self.num_missing = sum(slot.num_expected for slot in self.slots)
        self._is_advanced = False
        self._pending: Pending | None = None
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
        self._only: torch.Tensor | None = None  # the contribution of a bucket's one slot, to be reduced in place
        self._result: torch.Tensor | None = None
        self._takes_only = len(self.slots) == 1 and reduction.scatter is None and not self._casts
        on_cpu = self._buffer.device.type == "cpu"
        self._copies_early = [
            on_cpu and slot.contribution.pieces is None and slot.num_bytes >= _LARGE_BYTES for slot in self.slots
        ]
        self._can_scale_early = any(self._copies_early) and _is_exact(reduction)

    @property
    def op(self) -> str:
        return self.reduction.stages[0].op

    @property
    def is_full(self) -> bool:
        return self.num_missing <= 0

    @property
    def _casts(self) -> bool:
        return self.reduction.dtype != self.reduction.reduce_dtype

    @property
    def _early_scale(self) -> float:
        """What contributions are multiplied by. A hook is given sums."""
        return 1 / self.reduction.divisor if self._can_scale_early and self.hook is None else 1.0

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
        the gradient; None when the buffer has another dtype or order, or is not needed."""
        if self.reduction.scatter is not None or self._casts or self._takes_only:
            return None
        self.open()
        return self._views[slot.index][0].view(slot.contribution.local_shape)

    # One reduction

    def arrive(self, slot: Slot, gradient: torch.Tensor) -> None:
        """A contribution that nobody else writes to any more; a second one is added to the first."""
        if slot.gradient is not None:
            slot.gradient.add_(gradient, alpha=slot.scale)
        elif self._takes_only and _is_sole(gradient):
            slot.gradient, slot.scale = gradient, 1.0
            self._only = gradient.view(-1)
        elif self._copies_early[slot.index]:
            self.open()
            slot.gradient, slot.scale = self._views[slot.index][0], self._early_scale
            _copy_scaled(slot.gradient, gradient, slot.scale)
        else:
            slot.gradient, slot.scale = gradient, 1.0
        slot.num_arrived += 1
        self.num_missing -= 1

    def launch(self, missing: float | None = None) -> None:
        """Bring all contributions together and start the first collective; the same on every rank.

        ``missing`` stands for those that have not come; None: an element that changes nothing.
        """
        self.is_launched = True
        local, marks = self._filled(neutral(self.op) if missing is None else missing)
        if self.op == "sum" and len(marks):
            clear_signs(local, marks)
        if self.scatters and self.hook is None:
            assert self.reduction.scatter is not None
            scattering = self._buffer.reduce_scatter([self.reduction.scatter], op="sum", asker=self.asker)
            self._pending = Pending(scattering.buffer.local, [scattering])
        else:
            self._pending = self._start(self.reduction.stages[0], local)

    def _filled(self, missing: float) -> tuple[torch.Tensor, torch.Tensor | list[int]]:
        """What is to be reduced, flat, and where in it contributions begin. What has not been copied yet is copied at
        once."""
        if self._only is not None:
            if self._early_scale != 1:
                self._only.mul_(self._early_scale)
            return self._only, [0] if self._only.numel() else []
        self.open()
        marks: list[int] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        unscaled: list[torch.Tensor] = []
        is_full = True
        for slot, views, own_marks in zip(self.slots, self._views, self._marks, strict=True):
            gradient, slot.gradient = slot.gradient, None
            if gradient is None:
                is_full = False
                for view in views:
                    view.fill_(missing)
                continue
            marks += own_marks
            if slot.contribution.pieces is not None:
                targets += views
                sources += [box.view(gradient) for piece in slot.contribution.pieces for box in piece.source]
                unscaled += views
            elif gradient is not views[0]:
                if gradient.data_ptr() != views[0].data_ptr():  # else it has accumulated there
                    targets.append(views[0])
                    sources.append(gradient)
                unscaled.append(views[0])
        if targets:
            foreach_copy_(targets, sources)
        if self._early_scale != 1 and unscaled:
            foreach_scale_(unscaled, self._early_scale)
        if not is_full:
            return self._buffer.local, marks
        if self._all_marks is None:
            self._all_marks = torch.tensor(marks, dtype=torch.int64, device=self._buffer.device)
        return self._buffer.local, self._all_marks

    def _start(self, stage: Stage, tensor: torch.Tensor) -> Pending:
        group = stage.axes.group().group
        if self.hook is None:
            return all_reduce_(tensor, stage.op, group, asker=self.asker)
        names = tuple(slot.name for slot in self.slots)
        answer = self.hook(GradientBucket(self.index, names, tensor, group, stage.op))
        return answer if isinstance(answer, Pending) else Pending(answer)

    def advance(self) -> None:
        """Wait for the first collective if another one follows it, and start that; once in a reduction."""
        if self._is_advanced:
            return
        self._is_advanced = True
        stages = self.reduction.stages
        if self.scatters and self.hook is None:
            rest = tuple(axis for axis in stages[0].axes.axes if axis != self.reduction.scatter)
            if rest:
                group = axis_group(stages[0].axes.mesh, rest).group
                self._pending = all_reduce_(self._wait(), "sum", group, asker=self.asker)
        for stage in stages[1:]:
            self._pending = self._start(stage, self._wait())

    def _wait(self) -> torch.Tensor:
        """The result of the collective in flight, where the one before left it."""
        assert self._pending is not None
        found = self._pending.wait()
        self._pending = None
        if self.hook is not None:
            local = self._only if self._only is not None else self._buffer.local
            if found.data_ptr() != local.data_ptr() or found.dtype != local.dtype:
                local.copy_(found.view(-1))
            return local
        return found

    def finish(self) -> None:
        """Wait for the last collective; :meth:`result` is then there, and the bucket is closed."""
        result = self._wait()
        if self.reduction.divisor > 1 and self._early_scale == 1:
            result.div_(self.reduction.divisor)
        if self.reduction.scatter is not None:
            if not (self.scatters and self.hook is None):
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
        self._result = self._only = None
        self.is_open = self.is_launched = self._is_advanced = False
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


def _copy_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    if target.dtype == source.dtype and target.data_ptr() != source.data_ptr() and scale != 1:
        torch.mul(source, scale, out=target)
        return
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def _is_exact(reduction: Reduction) -> bool:
    """Whether contributions may be divided before they are added up: by a power of two, in a dtype with room below."""
    divisor = reduction.divisor
    return divisor > 1 and divisor & (divisor - 1) == 0 and reduction.reduce_dtype != torch.float16


def _is_sole(gradient: torch.Tensor) -> bool:
    """Whether nobody else sees the memory of a gradient, and it is one piece."""
    return gradient.is_contiguous() and num_storage_users(gradient) <= num_storage_users(torch.empty(0))
