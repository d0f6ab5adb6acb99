"""``BucketMemory``: the DBuffer of a bucket, and the position of each gradient in it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any, Generic, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial

from vescale.buffer import DBuffer, TensorGroup
from vescale.compat import TELLS_HOLDERS, TensorRow, are_unheld, foreach_copy_, make_dtensor, num_storage_users, spec_of
from vescale.gradients._buffer_reduction import clear_signs
from vescale.gradients._complete_gradient import mark_complete
from vescale.gradients._reduction import Arrival, Contribution, Reduction

# ``BucketSlot``: the place of one gradient in a bucket.

BucketT = TypeVar("BucketT")


class BucketSlot(Generic[BucketT]):
    """The place of one gradient in a bucket.

    Attributes:
        name: name of the parameter.
        owner: the object that the gradient belongs to; opaque here.
        arrival, contribution: how the gradient arrives, and what has to be done with it.
        num_expected: how often it arrives in one backward (more than once under reentrant checkpointing).
        parameter: the parameter whose ``grad``, or the local tensor of it, is the contribution without any conversion, so
            that the bucket may take it from there; None if the contribution is converted first.
        spec, result_spec: of ``grad`` when it arrives and when it is complete, where these are DTensors; else None.
        bucket, index: the bucket, and the position in it.
        is_notified, is_collected: whether a hook notifies the bucket of each gradient, and whether the bucket collects the
            gradient from the parameter; see :class:`HookMuting`.
    """

    bucket: BucketT
    index: int
    is_notified, is_collected = True, False

    def __init__(
        self,
        name: str,
        owner: Any,
        arrival: Arrival,
        contribution: Contribution,
        num_expected: int,
        parameter: torch.Tensor | None = None,
        spec: Any = None,
        result_spec: Any = None,
    ) -> None:
        self.name, self.owner = name, owner
        self.arrival, self.contribution = arrival, contribution
        self.num_expected = num_expected
        self.parameter, self.spec, self.result_spec = parameter, spec, result_spec
        self.strides = torch.empty(contribution.local_shape, device="meta").stride()

    def note_spec_of(self, gradient: torch.Tensor) -> None:
        """Of a gradient that has arrived here; the next one has the same, most likely."""
        if self.spec is not None and isinstance(gradient, DTensor):
            self.spec = spec_of(gradient)

    @property
    def reduction(self) -> Reduction:
        assert self.contribution.reduction is not None
        return self.contribution.reduction

    @property
    def numel(self) -> int:
        return self.contribution.numel

    @property
    def num_bytes(self) -> int:
        return self.numel * self.reduction.reduce_dtype.itemsize


class BucketMemory:
    """Holds the contributions before a reduction and, unless the bucket is scattered, the results after it.

    The buffer of a bucket that is scattered along an axis has one piece for each rank there, with its parts of all slots.
    ``early`` slots (see :meth:`fill`) come first, so that the others are contiguous.
    """

    def __init__(self, reduction: Reduction, slots: Sequence[BucketSlot[Any]], early: Sequence[bool]) -> None:
        self._reduction, self._slots = reduction, tuple(slots)
        self._sizes = _piece_sizes(self._slots, reduction.num_pieces)
        order = sorted(range(len(slots)), key=lambda index: not early[index])
        self.buffer = self._new_buffer(order)
        self._marks = self._starts(order)
        self._empty_marks = [  # those of empty parts
            [mark for mark, piece in zip(marks, slot.contribution.pieces) if not piece.numel]
            if slot.contribution.pieces is not None
            else ([] if slot.numel else marks)
            for slot, marks in zip(self._slots, self._marks)
        ]
        self._num_early = sum(slot.numel for slot, is_early in zip(self._slots, early) if is_early)
        self._is_simple = reduction.scatter is None and all(slot.numel for slot in self._slots)
        self._views: list[list[torch.Tensor]] = []  # of each slot: the parts of its gradient in buffer order
        self._results = TensorRow(())  # of each slot: its gradient, the same tensor in each step
        self._gradients: TensorRow | None = None  # DTensors around the results, if all are
        self._specs = [slot.result_spec for slot in self._slots]
        self._places: tuple[Sequence[int], TensorRow] | None = None
        self._num_users = 0
        self._all_marks: torch.Tensor | None = None
        self._all_zeros = torch.empty(0)
        self.is_borrowed = False
        """Whether a gradient may have been accumulated in the buffer before it was contributed."""

    def _new_buffer(self, order: Sequence[int]) -> DBuffer:
        """Partial along the axes of the first stage, unrelated along the others."""
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
            alignment_bytes=reduction.reduce_dtype.itemsize,  # no padding, because everything is communicated
        )
        placements = [Partial(stage.op) if axis in stage.axes.axes else None for axis in range(stage.axes.mesh.ndim)]
        return DBuffer(group, stage.axes.mesh, placements, dtype=reduction.reduce_dtype)

    def _starts(self, order: Sequence[int]) -> list[list[int]]:
        """For each slot, the offset of its part in each piece."""
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
        """The part of the buffer that holds the gradient of a slot, which is neither scattered nor empty, in its shape."""
        return self._views[index][0]

    def places(self, indices: Sequence[int]) -> TensorRow:
        """The views of several slots; cached for the last ``indices``, by identity."""
        if self._places is None or self._places[0] is not indices:
            self._places = indices, TensorRow([self.view(index) for index in indices])
        return self._places[1]

    # Contributions

    def open(self, *, may_allocate: bool = True) -> bool:
        """Prepare for contributions. New memory is allocated if the old one is still referenced, or, if it may not be, False
        returned."""
        is_free = bool(self._views) and self._is_unreferenced()
        if not may_allocate and not (is_free and self.buffer.is_allocated):
            return False
        if self._views and not is_free:
            self.buffer, self._views, self._results = self.buffer.like(), [], TensorRow(())
            self._gradients = None
        if not self.buffer.is_allocated:
            self.buffer.allocate()
        if not self._views:
            self._views, self._places = self._new_views(), None
            self._num_users = num_storage_users(self.buffer.local)
        return True

    def _is_unreferenced(self) -> bool:
        results = self._results.tensors
        if num_storage_users(self.buffer.local) != self._num_users + len(results):
            return False
        if self._gradients is None:
            return are_unheld(results)
        return self._gradients.are_dtensors_unheld(results, self._specs)

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

    def fill(
        self, given: Mapping[int, torch.Tensor], missing: float, scale: float, absent: Sequence[BucketSlot[Any]]
    ) -> None:
        """Copy all contributions to their positions in one call, and scale them.

        Args:
            given: the contributions by slot index. That of an early slot is its view, and is scaled already.
            missing: the value that stands for the contributions of the ``absent`` slots.
            scale: factor for the slots that are not early; 1 if the bucket is scattered.
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
        if self.is_borrowed:
            pairs = [(t, s) for t, s in zip(targets, sources) if t.data_ptr() != s.data_ptr()]
            targets, sources = [t for t, _ in pairs], [s for _, s in pairs]
            self.is_borrowed = False
        if targets:
            foreach_copy_(targets, sources)
        if absent or not self._is_simple:
            self._fill_without_contribution({slot.index for slot in absent}, missing)
        if scale != 1:
            self.buffer.local[self._num_early :].mul_(scale)

    def _fill_without_contribution(self, absent: Set[int], missing: float) -> None:
        for index, (views, marks) in enumerate(zip(self._views, self._empty_marks)):
            for mark in marks:
                self.buffer.local[mark] = missing if index in absent else 0.0
            if index in absent:
                for view in views:
                    view.fill_(missing)

    def clear_signs(self, absent: Sequence[BucketSlot[Any]]) -> None:
        """Mark all slots as used, except the ``absent`` ones."""
        if absent:
            indices = {slot.index for slot in absent}
            clear_signs(
                self.buffer.local, [m for index, own in enumerate(self._marks) if index not in indices for m in own]
            )
            return
        if self._all_marks is None:  # the same whenever no slot is absent
            marks = list(itertools.chain.from_iterable(self._marks))
            self._all_marks = torch.tensor(marks, dtype=torch.int64, device=self.buffer.device)
            self._all_zeros = self.buffer.local.new_zeros(len(marks))
        self.buffer.local.index_add_(0, self._all_marks, self._all_zeros)

    # Results

    def results(self, flat: torch.Tensor) -> TensorRow:
        """For each slot, its part of ``flat``, the reduced buffer or a copy of it. Not for scattered buckets."""
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

    def gradients(self, results: TensorRow) -> TensorRow:
        """What is to be the parameters' ``grad``: the results, of DTensors around them."""
        if not any(self._specs):
            return results
        if self._gradients is not None and results is self._results:
            return self._gradients
        made = TensorRow(
            [x if spec is None else make_dtensor(x, spec) for x, spec in zip(results.tensors, self._specs, strict=True)]
        )
        for gradient in made.tensors:
            mark_complete(gradient)
        if results is self._results and all(self._specs):
            self._gradients = made
        return made

    def start(self, slot: BucketSlot[Any], piece: int | None = None) -> int:
        """The offset of a slot's part in the buffer, or in one scattered piece of it."""
        return self._marks[slot.index][0] if piece is None else sum(self._sizes[piece][: slot.index])


def _piece_sizes(slots: Sequence[BucketSlot[Any]], num_pieces: int) -> list[list[int]]:
    """For each piece, the number of elements of each slot; at least one, for the mark."""
    return [
        [
            max(1, slot.numel if slot.contribution.pieces is None else slot.contribution.pieces[number].numel)
            for slot in slots
        ]
        for number in range(num_pieces)
    ]
