"""``hang_report``: a job that hangs ends, with one sentence that says why."""

from __future__ import annotations

import os
import threading
from types import TracebackType

from vescale.comm import wait_limit
from vescale.debug._watchdog import HangWatch

__all__ = ["HangReport", "hang_report", "start_from_environment", "the_watch"]

_LOCK = threading.Lock()
_WATCHES: list[HangWatch] = []


class HangReport:
    """What :func:`hang_report` returns: on until :meth:`close`, or until its ``with`` block is left."""

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
        # An exception on its way out of the program is reported by the watch, which ends the job.


def hang_report(timeout: float | None = None, *, folder: str | os.PathLike[str] | None = None) -> HangReport:
    """Watch the collectives of this job, and end it with a report when one hangs. Call it on every rank.

    When a rank waits for longer than ``timeout`` seconds in a collective, of whatever code, one sentence says which
    rank did not
    enter which collective of which module, and where that rank is; it is printed once and written, with the stacks of all
    ranks, to a file. All ranks then end with exit code 70; so they do when an exception leaves the program on one of them.
    Ranks that are stopped, or do not answer, are killed where they run on the host of one that does.

    Works with every backend, needs no collective, and not the rank in question. While it is on, collectives have no
    timeout of
    their own, and no time passes at breakpoints. Off, nothing is installed. The environment variable ``VESCALE_TIMEOUT`` (in
    seconds) switches it on for a program that imports ``vescale``.

    Args:
        timeout: in seconds; None: ``VESCALE_TIMEOUT``.
        folder: where the report is written; by default the environment variable ``VESCALE_REPORTS``, or the current folder.

    Communication: each rank writes a few hundred bytes to the rendezvous store every second (eighth of ``timeout``).

    Raises ValueError for a timeout that is no positive number, and RuntimeError when it is on already.
    """
    limit = wait_limit()
    seconds = timeout if timeout is not None else limit.total_seconds() if limit is not None else None
    if seconds is None or not 0 < seconds < float("inf"):
        raise ValueError(
            f"hang_report: timeout is {seconds}; give a positive number of seconds, or set VESCALE_TIMEOUT"
        )
    with _LOCK:
        if _WATCHES:
            raise RuntimeError(
                f"hang_report is on already, with {_WATCHES[0].limit} s; close that one first, or unset VESCALE_TIMEOUT"
            )
        _WATCHES.append(HangWatch(seconds, folder))
        return HangReport(_WATCHES[0])


def start_from_environment() -> None:
    """Switch the report on as ``VESCALE_TIMEOUT`` says, unless it is on."""
    if not _WATCHES:
        hang_report()


def the_watch() -> HangWatch | None:
    """The watch of this process."""
    return _WATCHES[0] if _WATCHES else None
