"""``Bucket``: gradients that are reduced together in one DBuffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm import Pending, all_reduce_, axis_group, link_of, reduction_cost, ring_bytes
from vescale.compat import (
    ZEROED,
    ArrivalCount,
    GradientPlaces,
    ParameterRow,
    TensorRow,
    dense_part,
    is_dense,
    make_dtensor,
    num_storage_users,
)
from vescale.gradients._bucket_memory import BucketMemory, BucketSlot
from vescale.gradients._buffer_reduction import BufferReduction, clear_signs, is_unused, neutral
from vescale.gradients._comm_hook import CommHook, GradientBucket, call_hook
from vescale.gradients._complete_gradient import added, local_part
from vescale.gradients._reduction import Reduction, copy_scaled, divide_, is_exact_before_sum
from vescale.placements import unpack

# ``HookMuting``: which gradients of a bucket are announced by a hook, and which ones the bucket collects by itself.


class HookMuting:
    """Mutes the hooks of small gradients, because a call into Python per parameter costs more than reducing the gradient.

    A slot is *notified* if a hook runs when its gradient has arrived, and *muted* otherwise. A slot is *collected* if its
    gradient stays with the parameter until the bucket takes all collected gradients in one call; other gradients are handed
    over one by one.

    After a backward in which all gradients arrived, every slot that allows it is collected, and of these only the one that
    arrived last stays notified. Each rank decides this for itself: a bucket is launched when all of its gradients have
    arrived, or at the end of backward. If some were missing when the last one arrived, all slots are notified again, for
    twice as many backwards as before.

    Gradients that are DTensors are collected, too, but stay notified: backward communicates between them, and their bucket
    has to be launched at one moment on all ranks, whatever the order in which they arrive. Their hooks count in C++, and
    call Python for the last one.

    Attributes:
        collected: the slots that are; ``indices``, ``parameters``: of these.
        num_expected: how many gradients of notified slots arrive in a backward.
        arrivals: which of them have arrived.
    """

    def __init__(self, slots: Sequence[BucketSlot[Any]], may_be_collected: Sequence[bool]) -> None:
        self._slots = tuple(slots)
        self.arrivals = ArrivalCount([slot.num_expected for slot in slots])
        self._handed_over = {
            slot
            for slot, may in zip(slots, may_be_collected)
            if not may or slot.num_expected > 1 or slot.parameter is None
        }
        self._dtensors = {slot for slot in slots if slot.spec is not None}
        self._num_regular = 0  # consecutive backwards in which all slots were notified and all gradients arrived
        self._num_required = 1
        self._places: tuple[TensorRow, GradientPlaces] | None = None
        self._notify_all()

    def _notify_all(self) -> None:
        self._set(set(self._slots), handed_over=set(self._slots))

    def _set(self, notified: set[BucketSlot[Any]], handed_over: set[BucketSlot[Any]]) -> None:
        self.collected = tuple(slot for slot in self._slots if slot not in handed_over)
        self.indices = [slot.index for slot in self.collected]
        self.parameters = ParameterRow(
            [slot.parameter for slot in self.collected if slot.parameter is not None],
            [slot.spec for slot in self.collected],
        )
        self.num_expected = sum(slot.num_expected for slot in notified)
        for slot in self._slots:
            slot.is_notified, slot.is_collected = slot in notified, slot not in handed_over
            slot.owner.notify(slot.is_notified)
            slot.owner.count(self.arrivals if slot.is_notified and slot.is_collected else None, slot.index)

    @property
    def may_place(self) -> bool:
        """Whether hooks may copy gradients of collected slots to the bucket."""
        return self.parameters.has_dtensors and self.arrivals.placed_bytes is not None

    def start(self, row: TensorRow) -> None:
        """Let hooks count gradients, and copy those of collected slots to ``row``."""
        if self._places is None or self._places[0] is not row:
            targets = dict(zip(self.indices, row.tensors, strict=True))
            found = GradientPlaces([targets.get(s.index) for s in self._slots], [s.spec for s in self._slots])
            self._places = row, found
        self.arrivals.start(self._places[1])

    def never_collect(self, slot: BucketSlot[Any]) -> None:
        """From now on the slot is notified, and its gradients are handed over."""
        self._handed_over.add(slot)
        self._notify_all()

    def update(self, last: BucketSlot[Any] | None, *, is_regular: bool) -> None:
        """Adapt after a backward in which gradients arrived.

        Args:
            last: the notified slot whose gradient arrived last.
            is_regular: whether all gradients had arrived by then.
        """
        if not is_regular:
            self._num_regular = 0
            if self.collected:
                self._num_required *= 2
                self._notify_all()
            return
        self._num_regular += 1
        may_mute = not self.collected and self._num_regular >= self._num_required
        if may_mute and last is not None and len(self._handed_over) < len(self._slots):
            self._set(self._handed_over | self._dtensors | {last}, self._handed_over)


_LARGE_BYTES = 2**20
"""A gradient on the CPU of at least this size is copied when it arrives, and divided by the way, and its memory is free;
copying smaller ones together is faster."""

Versions = Mapping[int, int]
"""Of the gradients that exist when a backward begins: the version, by id of the parameter. A contribution increases it."""


class Bucket:
    """Slots with equal reductions, and the memory in which they are reduced.

    ============  ==================================================================================================
    state         the memory holds
    ============  ==================================================================================================
    closed        the results of the last reduction, of which gradients are views, or nothing that is referenced
    ``launch``    the contributions of all slots, neutral elements for missing ones; one collective is in flight
    ``advance``   the further collectives are in flight (all-reduce of the scattered piece; axes without a common group)
    ``finish``    the results
    ============  ==================================================================================================

    Contributions are handed over with ``arrive``. The bucket collects those of *collected* slots from their parameters in
    one call, when the gradient that usually arrives last has arrived; see :class:`HookMuting`. In static mode, in a backward
    that begins without any gradients, most are *placed* in the bucket's memory by then; see :class:`ArrivalCount`.

    If the bucket has a single slot and nothing else references the gradient, it is reduced in place, without a copy.

    An average is a sum that is divided: before the reduction if that is exact and the gradient is copied anyway, else after.
    """

    absent: list[BucketSlot[Bucket]]
    """After the launch: the slots without a contribution."""
    is_launched: bool
    is_unused: torch.Tensor
    """After the end, if slots are absent: for each of these, whether no rank has contributed to it."""
    _is_open: bool
    _has_all: bool  # contributions
    _has_marks: bool  # no contribution begins with -0.0
    _is_irregular: bool  # a gradient was missing when all notified slots had theirs
    _last: BucketSlot[Bucket] | None  # that was notified
    _given: dict[int, torch.Tensor]  # contributions by slot index, except collected ones
    _only: torch.Tensor | None  # the contribution of the only slot, to be reduced in place
    _result: torch.Tensor | None

    def __init__(
        self,
        index: int,
        reduction: Reduction,
        slots: Sequence[BucketSlot[Bucket]],
        hook: CommHook | None = None,
        *,
        requester: str | None = None,
    ) -> None:
        self.index, self.reduction, self.slots = index, reduction, tuple(slots)
        self.op = reduction.stages[0].op
        self.hook = hook
        for place, slot in enumerate(self.slots):
            slot.bucket, slot.index = self, place
        on_cpu = reduction.stages[0].axes.mesh.device_type == "cpu"
        self._copies_early = [
            on_cpu and slot.contribution.pieces is None and slot.num_bytes >= _LARGE_BYTES for slot in self.slots
        ]
        self._can_scale_early = any(self._copies_early) and is_exact_before_sum(reduction)
        self._memory = BucketMemory(reduction, self.slots, self._copies_early)
        self.num_bytes = self._memory.buffer.num_bytes
        self._cost = reduction_cost(
            self.num_bytes,
            reduction.stages[0].axes.num_ranks,
            reduction.num_pieces,
            link_of(self._memory.buffer.device.type),
        )
        self.scatters = self._cost.scatters
        self._can_reduce_in_place = (
            len(self.slots) == 1 and reduction.scatter is None and not self._casts and self.slots[0].numel > 0
        )
        self.muting = HookMuting(
            self.slots,
            [
                not early and s.numel > 0 and not self._can_reduce_in_place
                for s, early in zip(self.slots, self._copies_early)
            ],
        )
        self.arrivals = self.muting.arrivals
        self._parameters = ParameterRow([slot.parameter for slot in self.slots if slot.parameter is not None])
        others = f" with {len(self.slots) - 1} others" if len(self.slots) > 1 else ""
        self.requester = requester or f"bucket {index}: {self.slots[0].name}.grad: reduced{others}"
        self._running = BufferReduction(reduction, self._all_reduce, self.requester)
        self._may_place = self.op == "sum" and not self._casts and reduction.dtype in ZEROED
        self._reset()

    @property
    def _casts(self) -> bool:
        return self.reduction.dtype != self.reduction.reduce_dtype

    @property
    def _early_scale(self) -> float:
        """The factor of contributions that are copied early. A communication hook gets sums."""
        return 1 / self.reduction.divisor if self._can_scale_early and self.hook is None else 1.0

    def place(self, slot: BucketSlot[Bucket]) -> torch.Tensor | None:
        """A new view of the open buffer in which the slot's gradient may accumulate, in the shape of the gradient; None if
        the buffer has another dtype or order, or is not needed."""
        if self.reduction.scatter is not None or self._casts or self._can_reduce_in_place or not slot.numel:
            return None
        self._open()
        self._memory.is_borrowed = True
        return self._memory.view(slot.index).view(slot.contribution.local_shape)

    def _open(self) -> None:
        if not self._is_open:
            self._is_open = True
            self._memory.open()

    # One reduction

    def count_arrivals(self, *, may_place: bool) -> None:
        """Let hooks count gradients in C++, and place them if ``may_place`` and the memory is free."""
        if may_place and self._may_place and self.muting.may_place:
            self._is_open = self._is_open or self._memory.open(may_allocate=False)
            if self._is_open:
                self.muting.start(self._memory.places(self.muting.indices))
                return
        self.arrivals.start()

    def _return_placed(self) -> None:
        """Make gradients that are placed the parameters' again, as if they had not been."""
        for index in self.arrivals.placed():
            slot = self.slots[index]
            assert slot.parameter is not None
            later, gradient = slot.parameter.grad, make_dtensor(self._memory.view(index).clone(), slot.spec)
            slot.parameter.grad = gradient if later is None else added(gradient, local_part(later), slot.spec)
        self.arrivals.forget_placed()

    def arrive(self, slot: BucketSlot[Bucket], gradient: torch.Tensor) -> None:
        """Hand over a contribution that nothing else writes to any more; a second one is added to the first."""
        index = slot.index
        before = self._given.get(index)
        if before is not None:
            is_scaled = self._copies_early[index] and self._only is None
            before.add_(gradient, alpha=self._early_scale if is_scaled else 1.0)
        elif self._can_reduce_in_place and _is_sole(gradient):
            self._given[index] = gradient
            self._only = gradient.view(-1)
        elif self._copies_early[index]:
            self._open()
            view = self._given[index] = self._memory.view(index)
            copy_scaled(view, gradient, self._early_scale)
        else:
            self._given[index] = gradient
        if slot.is_notified:
            self._count(slot)

    def accept(self, slot: BucketSlot[Bucket]) -> bool:
        """Called when a gradient has been accumulated in the slot's parameter: count it, and hand it over unless the slot is
        collected. Returns False, and does nothing, if the gradient is not what the slot expects."""
        if self.is_launched:
            return False
        if slot.is_collected:
            self._count(slot)
            return True
        parameter = slot.parameter
        if (
            parameter is None
            or slot.spec is not None
            or parameter.grad is None
            or not is_dense(parameter.grad, self.reduction.dtype)
        ):
            return False
        gradient, parameter.grad = parameter.grad, None
        self.arrive(slot, gradient)
        return True

    def _count(self, slot: BucketSlot[Bucket]) -> None:
        self._last = slot
        self.arrivals.add(slot.index)

    def has_arrivals(self) -> bool:
        """Whether a contribution has been announced, if the bucket has not been launched."""
        return self.arrivals.num_missing < self.muting.num_expected

    def is_ready(self, versions: Versions) -> bool:
        """Whether all expected contributions have arrived; if so, collects those of the collected slots."""
        if self.arrivals.num_missing > 0:
            return False
        if not self._has_all:
            self._has_all = self._collect(versions)
            self._is_irregular |= not self._has_all
        return self._has_all

    def _collect(self, versions: Versions) -> bool:
        muting = self.muting
        if not muting.indices:
            return True
        if versions and any(
            versions.get(id(parameter)) == gradient._version
            for parameter in muting.parameters.tensors
            if (gradient := parameter.grad) is not None
        ):
            return False
        self._open()
        places, parameters = self._memory.places(muting.indices), muting.parameters
        if self._may_place and parameters.has_dtensors:
            placed, zeroes = self.arrivals.placed_bytes, self._early_scale == 1
            if parameters.take_local_grads(places, placed, muting.indices, zeroes_signs=zeroes):
                self.arrivals.forget_placed()
                self._has_marks = zeroes and len(muting.indices) == len(self.slots)
                return True
            self._return_placed()
        return parameters.take_grads(places, self.reduction.dtype)

    def has_unannounced(self, versions: Versions) -> bool:
        """Whether a gradient has arrived at a collected slot."""
        return any(
            versions.get(id(parameter)) != gradient._version
            for parameter in self.muting.parameters.tensors
            if (gradient := parameter.grad) is not None
        )

    def _take_present(self, versions: Versions | None) -> None:
        """Take the gradients of collected slots that are there; with ``versions``, only those of this backward."""
        self._return_placed()
        for slot in self.muting.collected:
            assert slot.parameter is not None
            gradient = slot.parameter.grad
            part = dense_part(gradient, slot.spec, self.reduction.dtype)
            if gradient is None or part is None or slot.index in self._given:
                continue
            if versions is None or versions.get(id(slot.parameter)) != gradient._version:
                self._given[slot.index], slot.parameter.grad = part, None

    def launch(self, versions: Versions, missing: float | None = None) -> None:
        """Fill the buffer and start the first collective; called in the same order on every rank.

        ``missing`` stands for the contributions that have not arrived in a backward that an exception ended; None: there was
        no exception, and the neutral element stands for them.
        """
        self.is_launched = True
        self.arrivals.stop()
        if not self._has_all:
            self._take_present(versions if missing is not None else None)
            self.absent = [slot for slot in self.slots if slot.index not in self._given]
            self._has_all = not self.absent
        local = self._filled(neutral(self.op) if missing is None else missing)
        if self.scatters and self.hook is None:
            self._running.scatter(self._memory.buffer)
        else:
            self._running.start(local)

    def _filled(self, missing: float) -> torch.Tensor:
        """The tensor to reduce, flat."""
        given, self._given = self._given, {}
        scale = self._early_scale
        if self._only is not None:
            if scale != 1:
                self._only.mul_(scale)
            if self.op == "sum":
                clear_signs(self._only, [0])
            return self._only
        self._open()
        self._memory.fill(given, missing, scale, self.absent)
        if self.op == "sum" and not self._has_marks:
            self._memory.clear_signs(self.absent)
        return self._memory.local

    def _all_reduce(self, tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> Pending:
        if self.hook is None:
            return all_reduce_(tensor, op, group, requester=self.requester)
        names = tuple(slot.name for slot in self.slots)
        return call_hook(self.hook, GradientBucket(self.index, names, tensor, group, op))

    def advance(self) -> None:
        """If further collectives follow, wait for the first one and start them; does so once in a reduction."""
        self._running.advance()

    def finish(self) -> None:
        """Wait for the last collective; the results are available afterwards."""
        self._running.advance()
        result = self._running.finish()
        own = None
        if self.reduction.scatter is not None:
            own = self._own
            if not (self.scatters and self.hook is None):
                length = self._memory.piece_length
                result = result[own * length : (own + 1) * length].clone()
            self._memory.buffer.free()  # the results have memory of their own
        if self.absent:  # before numbers are rounded, which makes -0.0 of small ones
            marks = [self._memory.start(slot, own) for slot in self.absent]
            self.is_unused = is_unused(result[marks], self.op)
        if self.reduction.divisor > 1 and self._early_scale == 1:
            divide_(result, self.reduction.divisor)
        self._result = result.to(self.reduction.dtype)

    def results(self) -> TensorRow:
        """The reduced gradients of all slots, in the shapes of the contributions; this rank's parts of them if the bucket is
        scattered."""
        assert self._result is not None
        if self.reduction.scatter is None:
            return self._memory.results(self._result)
        own = self._own
        return TensorRow([self._scattered(slot, own, self._result) for slot in self.slots])

    def _scattered(self, slot: BucketSlot[Bucket], own: int, result: torch.Tensor) -> torch.Tensor:
        assert slot.contribution.pieces is not None
        piece, shape = slot.contribution.pieces[own], slot.contribution.result_shape
        start = self._memory.start(slot, own)
        flat = result[start : start + piece.numel]
        if len(piece.target) > 1:
            out = flat.new_empty(shape)
            unpack(flat, [piece], out)
            return out
        return flat.view(shape) if piece.numel == math.prod(shape) else flat

    def give_results(self) -> bool:
        """Make the results the parameters' gradients in one call. Returns False, and changes nothing, if a slot needs a
        conversion or a parameter has a gradient."""
        if len(self._parameters.tensors) < len(self.slots):
            return False
        return self._parameters.give_grads(self._memory.gradients(self.results()))

    def __repr__(self) -> str:
        return f"Bucket({self.index}, {len(self.slots)} gradients, {self.num_bytes} bytes, {self.reduction.text()})"

    def close(self) -> None:
        """Prepare for the next reduction; the results belong to the gradients now."""
        if self.is_launched and len(self.absent) < len(self.slots):
            self.muting.update(self._last, is_regular=self._has_all and not self._is_irregular)
        self._reset()

    def _reset(self) -> None:
        self.arrivals.reset(self.muting.num_expected)
        self.absent = []
        self.is_launched = self._is_open = False
        self._has_all = self._has_marks = self._is_irregular = False
        self._last = self._only = self._result = None
        self._given = {}

    @property
    def _own(self) -> int:
        assert self.reduction.scatter is not None
        return axis_group(self.reduction.stages[0].axes.mesh, (self.reduction.scatter,)).index

    # Cost

    @property
    def num_collectives(self) -> int:
        return self._cost.num_collectives + len(self.reduction.stages) - 1

    @property
    def moved_bytes(self) -> int:
        """Bytes that this rank sends for one reduction, as the ledger of collectives counts them."""
        others = self.reduction.stages[1:]
        return self._cost.num_bytes + sum(
            ring_bytes("all_reduce", self.num_bytes, stage.axes.num_ranks) for stage in others
        )


def _is_sole(gradient: torch.Tensor) -> bool:
    """Whether a gradient is contiguous and nothing else references its memory."""
    return gradient.is_contiguous() and num_storage_users(gradient) <= num_storage_users(torch.empty(0))
