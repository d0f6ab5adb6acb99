"""What a rank looks at while it waits for others for long: whether they will come at all."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale.compat import living_items

LONG_WAIT_SECONDS = 1.0
DEVICE = "its device"
_SLICE = timedelta(seconds=LONG_WAIT_SECONDS)


class Look(Protocol):
    looks_last: bool
    """After all others."""

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        """Called every second of a wait at least, on the thread that waits or for it: in a collective (``awaited`` is
        None), or for the ranks ``awaited``, at ``what``; :data:`DEVICE`: for its device, which may compute. Raises if ranks
        wait for each other in vain. ``in_vain``: the wait has failed, because the process of another rank has ended; raises
        if it is known why."""


# With the default group that each belongs to; None: it belongs to none.
_LOOKS: weakref.WeakKeyDictionary[Look, weakref.ref[dist.ProcessGroup] | None] = weakref.WeakKeyDictionary()


def look_while_waiting(each: Look) -> None:
    """From now on, as long as the object and today's default group exist."""
    world = dist.group.WORLD
    _LOOKS[each] = None if world is None else weakref.ref(world)


def look(awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
    today = dist.group.WORLD
    for each, world in sorted(living_items(_LOOKS), key=lambda item: item[0].looks_last):
        if world is None or (today is not None and world() is today):
            each.look(awaited, what, in_vain)


# When a thread has begun to wait for a message. Such a wait cannot be given up for a moment: gloo would break its
# connections.
_BEGAN: dict[int, float] = {}


@contextlib.contextmanager
def waits_for_message() -> Iterator[None]:
    """The thread waits for a message, and cannot look; another one may do it, see :func:`waiting_thread`."""
    thread = threading.get_ident()
    _BEGAN[thread] = time.monotonic()
    try:
        yield
    finally:
        del _BEGAN[thread]


def waiting_thread() -> int | None:
    """A thread that has waited for long for a message."""
    now = time.monotonic()
    return next((thread for thread, began in list(_BEGAN.items()) if now - began > LONG_WAIT_SECONDS), None)


class _Waits(threading.local):
    """For which ranks this thread waits, and where, if it is not for those that have begun the same collective."""

    awaited: Sequence[int] | None = None
    what = "a collective"


_WAITS = _Waits()


@contextlib.contextmanager
def waits_for(ranks: Sequence[int], what: str) -> Iterator[None]:
    """A collective inside is none that ranks post (see ``Look``): this rank waits before what they do, for ``ranks``."""
    _WAITS.awaited, _WAITS.what = ranks, what
    try:
        yield
    finally:
        del _WAITS.awaited, _WAITS.what


def wait_for_work(work: Any, out: torch.Tensor) -> None:
    """``work.wait()``, which waits for other ranks where ``out``, its result, is in the memory of the host."""
    if not _LOOKS or not isinstance(work, dist.Work) or out.device.type != "cpu":
        work.wait()
        return
    while not work.is_completed() and not _has_ended(work):
        look(_WAITS.awaited, _WAITS.what)
    try:
        work.wait()
    except RuntimeError:  # it has failed
        look(_WAITS.awaited, _WAITS.what, in_vain=True)
        raise


def _has_ended(work: Any) -> bool:
    """Wait for a slice of time. Whether the work has ended by then, as it should or by an error."""
    try:
        work.wait(_SLICE)
    except RuntimeError:  # not within the slice, or an error, which the next wait raises
        return bool(work.is_completed())
    return True
