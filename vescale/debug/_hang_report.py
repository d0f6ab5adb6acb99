"""``hang_report``: ends a job that hangs, with a report that names the cause."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from vescale.agreement import wait_limit
from vescale.debug._watchdog import HangWatch
from vescale.errors import DebugOptionError

_LOCK = threading.Lock()
_WATCHES: list[HangWatch] = []


class HangReport:
    """The handle that :func:`hang_report` returns: active until :meth:`close`, or until its ``with`` block ends."""

    def __init__(self, watch: HangWatch) -> None:
        self._watch = watch

    def close(self) -> None:
        with _LOCK:
            if self._watch in _WATCHES:
                _WATCHES.remove(self._watch)
        self._watch.close()

    def __enter__(self) -> HangReport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        # If an exception leaves the program, the watchdog reports it and ends the job.


def hang_report(timeout: float | None = None, *, folder: str | os.PathLike[str] | None = None) -> HangReport:
    """Watch the collectives of this job and, if one hangs, end the job with a report. Call it on every rank.

    If a rank waits for longer than ``timeout`` seconds in a collective, of whatever code, one sentence names the rank
    that did not enter it, the collective and its module, and where that rank is. It is printed once and written to a file
    with the stacks of all ranks. All ranks then end with exit code 70; they also do if an exception leaves the program on
    one of them. Ranks that are stopped or do not answer are killed by a rank on the same host.

    It works with every backend, and needs neither a collective nor the rank in question. While it is active, collectives
    have no timeout of their own, and its timeout is suspended at breakpoints. While it is inactive, nothing is installed.
    The environment variable ``VESCALE_TIMEOUT`` (in seconds) activates it in a program that imports ``vescale``.

    Args:
        timeout: in seconds; None: ``VESCALE_TIMEOUT``.
        folder: of the report; by default the environment variable ``VESCALE_REPORTS``, or the current folder.

    Communication: each rank writes a few hundred bytes to the rendezvous store every second (eighth of ``timeout``).

    Raises ValueError for a timeout that is not a positive number, and RuntimeError if it is active already.
    """
    limit = wait_limit()
    seconds = timeout if timeout is not None else limit.total_seconds() if limit is not None else None
    if seconds is None or not 0 < seconds < float("inf"):
        raise DebugOptionError(
            f"hang_report: timeout is {seconds}; pass a positive number of seconds, or set VESCALE_TIMEOUT"
        )
    with _LOCK:
        if _WATCHES:
            raise DebugOptionError(
                f"hang_report is already on, with {_WATCHES[0].limit} s; close it first, or unset VESCALE_TIMEOUT"
            )
        _WATCHES.append(HangWatch(seconds, folder))
        return HangReport(_WATCHES[0])


def start_from_environment() -> None:
    """Activate the report if ``VESCALE_TIMEOUT`` is set, unless it is active."""
    if not _WATCHES:
        hang_report()


def the_watch() -> HangWatch | None:
    """The watchdog of this process."""
    return _WATCHES[0] if _WATCHES else None
