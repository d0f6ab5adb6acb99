"""``BucketMemory``: the DBuffer of a bucket, and where in it each gradient lies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set

import torch
from torch.distributed.tensor import Partial

from vescale.buffer import DBuffer, TensorGroup
from vescale.compat import TELLS_HOLDERS, TensorRow, are_unheld, foreach_copy_, num_storage_users
from vescale.runtime._gradients._complete import mark_complete
from vescale.runtime._gradients._reduction import Reduction
from vescale.runtime._gradients._slot import Slot
from vescale.runtime._gradients._untouched import clear_signs

__all__ = ["BucketMemory"]


class BucketMemory:
    """Contributions before the reduction, and where nothing is scattered the results after it.

    The buffer of a bucket that is scattered along an axis has one piece for each rank there, with its parts of all slots.
    Slots that are ``early`` (see :meth:`fill`) come first, so that what the others hold is in one run.
    """

    def __init__(self, reduction: Reduction, slots: Sequence[Slot], early: Sequence[bool]) -> None:
        self._reduction, self._slots = reduction, tuple(slots)
        self._sizes = _piece_sizes(self._slots, reduction.num_pieces)
        order = sorted(range(len(slots)), key=lambda index: not early[index])
        self.buffer = self._new_buffer(order)
        self._marks = self._starts(order)
        self._bare_marks = [  # of these, where the part is empty
            [mark for mark, piece in zip(marks, slot.contribution.pieces) if not piece.numel]
            if slot.contribution.pieces is not None
            else ([] if slot.numel else marks)
            for slot, marks in zip(self._slots, self._marks)
        ]
        self._num_early = sum(slot.numel for slot, is_early in zip(self._slots, early) if is_early)
        self._is_simple = reduction.scatter is None and all(slot.numel for slot in self._slots)
        self._views: list[list[torch.Tensor]] = []  # for each slot, the parts of its gradient in buffer order
        self._results = TensorRow(())  # for each slot, what is given out as a gradient, again in each step
        self._places: tuple[Sequence[int], TensorRow] | None = None
        self._num_users = 0
        self._all_marks: torch.Tensor | None = None
        self._all_zeros = torch.empty(0)
        self.is_lent = False
        """Whether a gradient may have accumulated in its place before it was contributed."""

    def _new_buffer(self, order: Sequence[int]) -> DBuffer:
        """Contributions: Partial along the first stage's axes, of each rank's own along the others."""
        reduction = self._reduction
        stage = reduction.stages[0]
        if reduction.scatter is None:
            slots = [(index, self._slots[index]) for index in order]
            shapes = {f"{i} {slot.name}": slot.contribution.local_shape if slot.numel else (1,) for i, slot in slots}
        else:
            shapes = {"pieces": (reduction.num_pieces * max(sum(sizes) for sizes in self._sizes),)}
        group = TensorGroup.plan(
            shapes,
            reduction.num_pieces,
            dtypes=[reduction.reduce_dtype],
            alignment_bytes=reduction.reduce_dtype.itemsize,  # no padding: what is communicated is gradients
        )
        placements = [Partial(stage.op) if axis in stage.axes.axes else None for axis in range(stage.axes.mesh.ndim)]
        return DBuffer(group, stage.axes.mesh, placements, dtype=reduction.reduce_dtype)

    def _starts(self, order: Sequence[int]) -> list[list[int]]:
        """For each slot, where its part begins in each piece."""
        starts: list[list[int]] = [[] for _ in self._slots]
        if self._reduction.scatter is None:
            for index, offset in zip(order, self.buffer.group.layout.offsets):
                starts[index].append(offset)
            return starts
        for number, sizes in enumerate(self._sizes):
            at = number * self.piece_length
            for index, size in enumerate(sizes):
                starts[index].append(at)
                at += size
        return starts

    @property
    def piece_length(self) -> int:
        return self.buffer.numel // self._reduction.num_pieces

    @property
    def local(self) -> torch.Tensor:
        """All contributions, flat."""
        return self.buffer.local

    def view(self, index: int) -> torch.Tensor:
        """Where the gradient of a slot that is not scattered and not empty lies, in its shape."""
        return self._views[index][0]

    def places(self, indices: Sequence[int]) -> TensorRow:
        """The views of several slots. To be asked for with the same list again."""
        if self._places is None or self._places[0] is not indices:
            self._places = indices, TensorRow([self.view(index) for index in indices])
        return self._places[1]

    # Contributions

    def open(self) -> None:
        """Be ready for contributions: memory that somebody still sees is left to them, and new memory taken."""
        if self._views and not self._is_unseen():
            self.buffer, self._views, self._results = self.buffer.like(), [], TensorRow(())
        if not self.buffer.is_allocated:
            self.buffer.allocate()
        if not self._views:
            self._views, self._places = self._new_views(), None
            self._num_users = num_storage_users(self.buffer.local)

    def _is_unseen(self) -> bool:
        num_users = self._num_users + len(self._results.tensors)
        return num_storage_users(self.buffer.local) == num_users and are_unheld(self._results.tensors)

    def _new_views(self) -> list[list[torch.Tensor]]:
        views: list[list[torch.Tensor]] = [[] for _ in self._slots]
        for index, slot in enumerate(self._slots):
            if slot.contribution.pieces is None:
                if slot.numel:
                    views[index].append(self.buffer.alias(self._marks[index][0], slot.contribution.local_shape))
                continue
            for piece, start in zip(slot.contribution.pieces, self._marks[index]):
                for box in piece.source:
                    views[index].append(self.buffer.local[start : start + box.numel].view(box.sizes))
                    start += box.numel
        return views

    def fill(self, given: Mapping[int, torch.Tensor], missing: float, scale: float, absent: Sequence[Slot]) -> None:
        """Copy contributions to their places, all at once, and scale them.

        Args:
            given: by slot's index, where it comes from; the view itself of an early one, which is there and scaled. What
                else is there is not scaled.
            missing: what stands for the contributions of the slots that are ``absent``.
            scale: of what is not early. Not 1 only where nothing is scattered.
        """
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for index, gradient in given.items():
            views, pieces = self._views[index], self._slots[index].contribution.pieces
            if pieces is not None:
                targets += views
                sources += [box.view(gradient) for piece in pieces for box in piece.source]
            elif views and gradient is not views[0]:
                targets.append(views[0])
                sources.append(gradient)
        if self.is_lent:
            pairs = [(t, s) for t, s in zip(targets, sources) if t.data_ptr() != s.data_ptr()]
            targets, sources = [t for t, _ in pairs], [s for _, s in pairs]
            self.is_lent = False
        if targets:
            foreach_copy_(targets, sources)
        if absent or not self._is_simple:
            self._fill_without_contribution({slot.index for slot in absent}, missing)
        if scale != 1:
            self.buffer.local[self._num_early :].mul_(scale)

    def _fill_without_contribution(self, absent: Set[int], missing: float) -> None:
        for index, (views, bare) in enumerate(zip(self._views, self._bare_marks)):
            for mark in bare:
                self.buffer.local[mark] = missing if index in absent else 0.0
            if index in absent:
                for view in views:
                    view.fill_(missing)

    def clear_signs(self, absent: Sequence[Slot]) -> None:
        """Mark all slots but those that are ``absent`` as contributed to."""
        if absent:
            indices = {slot.index for slot in absent}
            clear_signs(
                self.buffer.local, [m for index, own in enumerate(self._marks) if index not in indices for m in own]
            )
            return
        if self._all_marks is None:  # the same in every full bucket
            marks = list(itertools.chain.from_iterable(self._marks))
            self._all_marks = torch.tensor(marks, dtype=torch.int64, device=self.buffer.device)
            self._all_zeros = self.buffer.local.new_zeros(len(marks))
        self.buffer.local.index_add_(0, self._all_marks, self._all_zeros)

    # Results

    def results(self, flat: torch.Tensor) -> TensorRow:
        """For each slot, its part of ``flat``, which is the reduced buffer or a copy of it, nothing scattered."""
        is_own = bool(self._views) and flat is self.buffer.local
        if is_own and self._results.tensors:
            return self._results
        found = TensorRow(
            [
                flat.as_strided(slot.contribution.local_shape, slot.strides, flat.storage_offset() + marks[0])
                for slot, marks in zip(self._slots, self._marks)
            ]
        )
        for result in found.tensors:
            mark_complete(result)
        if is_own and TELLS_HOLDERS:
            self._results = found
        return found

    def start(self, slot: Slot, piece: int | None = None) -> int:
        """Where a slot's part begins, in the buffer or in one scattered piece of it."""
        return self._marks[slot.index][0] if piece is None else sum(self._sizes[piece][: slot.index])


def _piece_sizes(slots: Sequence[Slot], num_pieces: int) -> list[list[int]]:
    """For each piece, the elements of each slot in it; one where a slot has none, to be marked."""
    return [
        [
            max(1, slot.numel if slot.contribution.pieces is None else slot.contribution.pieces[number].numel)
            for slot in slots
        ]
        for number in range(num_pieces)
    ]
