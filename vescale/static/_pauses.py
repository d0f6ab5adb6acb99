"""``Pauses``: while most steps take ways that were not recorded, they run in eager mode at once."""

from __future__ import annotations

from collections import deque

__all__ = ["PAUSED", "Pauses"]

PAUSED = "most of the last steps took branches, or gave functions arguments, that were not recorded"

_NUM_TRIES = 16
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 1024  # steps


class Pauses:
    """Of each kind of call: if more than two thirds of the last 16 tries had to be repeated in eager mode, the next 16 steps
    are not tried. If that goes on afterwards, the pause is twice as long each time, up to 1024 steps."""

    def __init__(self) -> None:
        self._tries: dict[str, deque[bool]] = {}  # whether each failed, since one has
        self._lengths: dict[str, int] = {}  # of the next pause
        self._left: dict[str, int] = {}

    def is_on(self, key: str) -> bool:
        return key in self._left

    def skips(self, key: str) -> bool:
        """Whether the step that begins is one of a pause."""
        left = self._left.get(key)
        if left is None:
            return False
        if left > 1:
            self._left[key] = left - 1
        else:
            del self._left[key]
        return True

    def note(self, key: str, failed: bool) -> None:
        """After a try."""
        tries = self._tries.get(key)
        if tries is None:
            if not failed:
                return
            tries = self._tries[key] = deque(maxlen=_NUM_TRIES)
        tries.append(failed)
        if len(tries) < _NUM_TRIES:
            return
        if not any(tries):
            del self._tries[key]
            self._lengths.pop(key, None)
        elif 3 * sum(tries) > 2 * _NUM_TRIES:
            length = self._left[key] = self._lengths.get(key, _FIRST_PAUSE)
            self._lengths[key] = min(2 * length, _LONGEST_PAUSE)
            tries.clear()
