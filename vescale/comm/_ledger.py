"""The communication ledger: every collective that vescale starts, as data."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale.comm._kept_results import KEEPERS, note_communication
from vescale.comm._observation import AS_PART, METERS, OBSERVERS, Part, axes_of
from vescale.compat import ThreadValue, note

# At the end of a program, threads of gloo let go of the tensors of the last collectives before the interpreter ends.
#
# To let go of a tensor that Python has seen, a thread needs the interpreter's lock (torch 2.13 counts such references
# in C++). Where the interpreter is ending, the thread that asks for the lock is ended instead, and with it the process
# ("terminate called without an active exception"): a program that has done its work has an exit code that says it has
# failed.


_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"  # of these threads
_MOMENT = 0.002  # seconds
_LIMIT = 1.0  # of the whole wait


@functools.cache
def release_at_end() -> None:
    """Called before the program's first collective: what ends later ends before this, and may communicate."""
    note("comm._ledger:process", "atexit")
    atexit.register(_release)


def _release() -> None:
    """Give up the interpreter's lock until no thread of gloo is waiting for it.

    A thread that waits for the lock is woken when it is given up. One that sleeps, and has not run meanwhile, is not
    waiting for it.
    """
    limit = time.monotonic() + _LIMIT
    before, now = None, _threads()
    while now and time.monotonic() < limit:
        if now == before and all(state == "S" for state, _ in now.values()):
            return
        time.sleep(_MOMENT)
        before, now = now, _threads()


def _threads() -> dict[str, tuple[str, str]]:
    """Of each thread of gloo, its state and how often it has gone to sleep; where the system does not tell, of one that
    runs."""
    if not _TASKS.exists():
        return {"": ("", "")}
    found = {}
    for task in os.listdir(_TASKS):
        try:
            lines = dict(
                line.split(":\t", 1) for line in (_TASKS / task / "status").read_text().splitlines() if ":\t" in line
            )
        except OSError:  # it has ended
            continue
        if lines["Name"] == _NAME:
            found[task] = lines["State"][0], lines["voluntary_ctxt_switches"]
    return found


@dataclass(frozen=True, slots=True)
class CommRecord:
    """One collective as this rank saw it.

    Attributes:
        op: ``all_gather_v``, ``reduce_scatter_v``, ``all_to_all_v``, ``all_reduce`` or ``broadcast``.
        num_ranks: ranks in the group.
        bytes: bytes this rank received from other ranks (for ``all_reduce``, ``2 (n-1)/n`` of the tensor, the ring
            algorithm's bound; for ``reduce_scatter_v``, the bytes it sent).
        padding_bytes: of these, bytes of padding.
        requester: the requester, for example ``model.norm.<out>: redistribute (S(1)) -> (R)``.
        axes: names of the mesh axes that the group spans, joined with ``,``; empty if they are not known.
    """

    op: str
    num_ranks: int
    bytes: int
    padding_bytes: int = 0
    requester: str = ""
    axes: str = ""


@dataclass
class Ledger:
    """Collectives in the order this rank started them.

    Attributes:
        records: one for each collective.
    """

    records: list[CommRecord] = field(default_factory=list)

    def count(self, op: str | None = None) -> int:
        """The number of collectives, or of those of the kind ``op``."""
        return sum(1 for r in self.records if op is None or r.op == op)

    def bytes(self, op: str | None = None) -> int:
        """Bytes of all collectives, or of those of the kind ``op``."""
        return sum(r.bytes for r in self.records if op is None or r.op == op)


# Open ledgers with their rank: ranks may be threads of one process (simulation), and backward may run on another thread, so
# that neither a thread-local nor a context variable would select the right collectives.
_OPEN: list[tuple[int, Ledger]] = []
_LOCK = threading.Lock()
_ASKING = ThreadValue("requester of collectives")


def _own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


@contextlib.contextmanager
def record_comms() -> Iterator[Ledger]:
    """Collect the collectives that this rank starts through ``vescale.comm`` while the context is open."""
    entry = (_own_rank(), Ledger())
    with _LOCK:
        _OPEN.append(entry)
    try:
        yield entry[1]
    finally:
        with _LOCK:
            _OPEN[:] = [other for other in _OPEN if other is not entry]


@contextlib.contextmanager
def requested_by(who: str) -> Iterator[None]:
    """Collectives that this thread and its backwards start inside get ``who`` as their requester."""
    with _ASKING.within(who):
        yield


def current_requester() -> str:
    """The requester set by :func:`requested_by` on this thread."""
    return _ASKING.get() or ""


LISTENERS: tuple[list[Any], ...] = (_OPEN, OBSERVERS, KEEPERS)
"""Somebody sees collectives, or keeps their results, while one of these lists has members. They stay the same lists: C++
looks at them, too."""


def record(
    op: str,
    num_ranks: int,
    num_bytes: int,
    *,
    padding_bytes: int = 0,
    requester: str = "",
    group: dist.ProcessGroup | None = None,
) -> contextlib.AbstractContextManager[None]:
    """Enter a collective in the open ledgers of this rank. To observers, collectives that start inside of the returned
    context are this one. Costs nothing if no ledger is open and there is no observer."""
    release_at_end()
    if not (any(LISTENERS) or METERS):
        return AS_PART
    if KEEPERS:
        note_communication(num_ranks)
    if not (_OPEN or OBSERVERS or METERS):
        return AS_PART
    who = ": ".join(part for part in (current_requester(), requester) if part)
    if _OPEN:
        rank = _own_rank()
        entry = CommRecord(op, num_ranks, num_bytes, padding_bytes, who, axes_of(group) if group is not None else "")
        for listener, ledger in tuple(_OPEN):  # another thread may close one
            if listener == rank:
                ledger.records.append(entry)
    return Part(op, num_bytes, who)
