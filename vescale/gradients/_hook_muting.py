"""``HookMuting``: which gradients of a bucket are announced by a hook, and which ones the bucket collects by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vescale.compat import ArrivalCount, GradientPlaces, ParameterRow, TensorRow
from vescale.gradients._bucket_slot import BucketSlot

__all__ = ["HookMuting"]


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
        return self.parameters.has_dtensors and bool(self.arrivals.address_of_placed)

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
