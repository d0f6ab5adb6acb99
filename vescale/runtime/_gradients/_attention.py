"""``Attention``: for which gradients of a bucket a hook tells that they have come, and which the bucket takes itself."""

from __future__ import annotations

from collections.abc import Sequence

from vescale.compat import ParameterRow
from vescale.runtime._gradients._slot import Slot

__all__ = ["Attention"]


class Attention:
    """Which slots of a bucket are *heard*: told of when a gradient has come; and which are *quiet*: their gradients stay
    with their parameters until the bucket takes all of these at once. Other gradients are handed over as they come.

    A call into Python for each parameter costs more than all the rest of reducing a small gradient. So once all gradients
    have come, all slots that may are quiet in the next backwards, and only the one that came last is heard. Whoever is heard
    is this rank's own business: a bucket is launched only when all have come, or at the end.

    If others were still missing when the last one came, all are heard again, and for twice as many backwards.
    """

    def __init__(self, slots: Sequence[Slot], may_be_quiet: Sequence[bool]) -> None:
        self._slots = tuple(slots)
        self._never_quiet = {
            slot for slot, may in zip(slots, may_be_quiet) if not may or slot.num_expected > 1 or slot.parameter is None
        }
        self._num_regular = 0  # backwards in which all were heard, and all came
        self._patience = 1
        self._hear_all()

    def _hear_all(self) -> None:
        self._hear(set(self._slots), handed=set(self._slots))

    def _hear(self, heard: set[Slot], handed: set[Slot]) -> None:
        self.quiet = tuple(slot for slot in self._slots if slot not in handed)
        self.indices = [slot.index for slot in self.quiet]
        self.parameters = ParameterRow([slot.parameter for slot in self.quiet if slot.parameter is not None])
        self.num_expected = sum(slot.num_expected for slot in heard)
        for slot in self._slots:
            slot.is_heard, slot.is_quiet = slot in heard, slot not in handed

    def insist(self, slot: Slot) -> None:
        """Hear a slot from now on, and have its gradients handed over."""
        self._never_quiet.add(slot)
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
        handed = self._never_quiet
        if len(handed) == len(self._slots) or last is None:
            return False
        self._hear(handed | {last}, handed)
        return bool(self.quiet)
