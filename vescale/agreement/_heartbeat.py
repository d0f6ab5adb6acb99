"""``Heartbeat``: what ranks compare in each step, in one small collective that nobody waits for.

==========================  ===========================================================================================
the ranks disagree in       they are told
==========================  ===========================================================================================
the first three messages    at once: the ranks wait for the message
a later one                 when the next one is sent, on a device the one after that, which the host then need not wait
                            for; on all ranks. Or before a save, or when the program ends, whichever comes first
                            (:func:`settle_heartbeats`). At once where the sender calls :meth:`Heartbeat.settle`
==========================  ===========================================================================================

A rank that has to know the answer at once (because it lacks gradients that others may have) waits for it; the others do not.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from vescale.comm import HostCopy, Pending, all_reduce_, to_device
from vescale.compat import note

FIRST_MESSAGES = 3

# Those whose last message has not been checked; also when their group, and what has held them, is gone.
_UNSETTLED: dict[Heartbeat, None] = {}


class Beat:
    """A message that has been sent."""

    def __init__(self, pending: Pending, check: Callable[[list[int]], None]) -> None:
        self.check = check
        self._pending: Pending | None = pending
        self._copy: HostCopy | None = None
        self._answer: list[int] = []
        if pending.out.device.type != "cpu":  # the copy follows the collective; the host goes on
            self._copy = HostCopy(pending.wait())

    def look(self) -> None:
        """Of an answer that is there, :meth:`answer` need not wait for the device later."""
        if self._copy is not None:
            self._copy.is_there()

    def answer(self) -> list[int]:
        """The maximum over the ranks. Waits for them."""
        if self._pending is not None:
            out = self._pending.wait() if self._copy is None else self._copy.read()
            self._answer = out.tolist()
            self._pending = self._copy = None
        return self._answer


class Heartbeat:
    """Of the ranks of ``group``, which send messages of equal lengths, equally often; ``requester``: in the ledger;
    ``num_first``: how many messages are compared at once."""

    def __init__(self, group: dist.ProcessGroup, requester: str, num_first: int = FIRST_MESSAGES) -> None:
        self.group, self._requester, self._num_first = group, requester, num_first
        self._sent: deque[Beat] = deque()
        self._num_sent = 0

    @property
    def is_new(self) -> bool:
        """Whether the next message is compared at once."""
        return self._num_sent < self._num_first

    def send(self, message: bytearray, device: torch.device, check: Callable[[list[int]], None]) -> Beat:
        """Check an earlier message, and send the next. ``check`` gets the maximum of each byte over the ranks, later, and
        raises on all ranks if it shows that they differ. Communication: one all-reduce of the message."""
        for earlier in self._sent:
            earlier.look()
        while len(self._sent) > (device.type != "cpu"):
            self._settle_first()
        own = to_device(torch.frombuffer(message, dtype=torch.uint8), device)
        beat = Beat(all_reduce_(own, "max", self.group, requester=self._requester), check)
        self._sent.append(beat)
        _UNSETTLED[self] = None
        _watch_end()
        if self.is_new:
            self._num_sent += 1
            self.settle()
        return beat

    def settle(self) -> None:
        """Check what was sent; raises what a ``check`` does. Called by all ranks of the group."""
        _UNSETTLED.pop(self, None)
        while self._sent:
            self._settle_first()

    def _settle_first(self) -> None:
        beat = self._sent.popleft()
        beat.check(beat.answer())

    def begin(self) -> None:
        """All ranks begin to run another model: the next messages are compared at once."""
        self._num_sent = 0

    def begin_anew(self) -> None:
        """All ranks have found that they differ: the next messages are compared at once."""
        self._num_sent = 0
        self._sent.clear()
        _UNSETTLED.pop(self, None)


def settle_heartbeats() -> None:
    """Check all messages that were sent: before something is saved, by all ranks. Raises what shows that they differ."""
    for heartbeat in list(_UNSETTLED):
        heartbeat.settle()


@functools.cache
def _watch_end() -> None:
    note("agreement._heartbeat:process", "atexit")
    atexit.register(_settle_at_end)


def _settle_at_end() -> None:
    """A difference of the last step is printed, and the process ends with code 1. Where the process group is gone, ranks
    cannot find out any more what differs."""
    if hasattr(sys, "last_type"):  # an error has ended the program
        return
    try:
        settle_heartbeats()
    except Exception:
        with suppress(OSError, ValueError):
            traceback.print_exc()
            sys.stderr.write("ranks have disagreed in the last step of the program\n")
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)
