"""``Attention``: for which gradients of a bucket a hook tells that they have come."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.compat import TensorRow
from vescale.runtime._gradients._slot import Slot

__all__ = ["Attention"]


class Attention:
    """Which slots of a bucket are *heard*: told of every gradient at once; the others are *quiet*.

    A call into Python for each parameter costs more than all the rest of reducing a small gradient. So once all gradients
    have come, only the one that came last is heard in the next backwards, and the bucket then takes the others from their
    parameters. Whoever is heard is this rank's own business: a bucket is launched only when all have come, or at the end.

    If others were still missing when the last one came, all are heard again, and for twice as many backwards.
    """

    def __init__(self, slots: Sequence[Slot], must_be_heard: Sequence[bool]) -> None:
        self._slots = tuple(slots)
        self._must_be_heard = {slot for slot, must in zip(slots, must_be_heard) if must or slot.num_expected > 1}
        self._num_regular = 0  # backwards in which all were heard, and all came
        self._patience = 1
        self._hear_all()

    def _hear_all(self) -> None:
        self._hear(set(self._slots))

    def _hear(self, heard: set[Slot]) -> None:
        self.quiet = tuple(slot for slot in self._slots if slot not in heard)
        self.indices = [slot.index for slot in self.quiet]
        self.parameters = [slot.parameter for slot in self.quiet if slot.parameter is not None]
        self.row = TensorRow(self.parameters)
        self.num_expected = sum(slot.num_expected for slot in heard)
        for slot in self._slots:
            slot.is_heard = slot in heard

    def insist(self, slot: Slot) -> None:
        """Hear a slot from now on."""
        self._must_be_heard.add(slot)
        self._hear_all()

    def learn(self, last: Slot | None, *, came_all: bool) -> bool:
        """After a backward that brought gradients: whether others are heard from now on.

        Args:
            last: the one that came last of those that are heard.
            came_all: whether all had come then.
        """
        if not came_all:
            self._num_regular = 0
            if not self.quiet:
                return False
            self._patience *= 2
            self._hear_all()
            return True
        self._num_regular += 1
        if self.quiet or self._num_regular < self._patience:
            return False
        without = {slot for slot in self._slots if slot is last or slot.parameter is None}
        self._hear(without | self._must_be_heard)
        return bool(self.quiet)
