"""At the end of a program, threads of gloo let go of the tensors of the last collectives before the interpreter ends.

To let go of a tensor that Python has seen, a thread needs the interpreter's lock (torch 2.13 counts such references in
C++). Where the interpreter is ending, the thread that asks for the lock is ended instead, and with it the process
("terminate called without an active exception"): a program that has done its work has an exit code that says it has failed.
"""

from __future__ import annotations

import atexit
import functools
import os
import time
from pathlib import Path

from vescale.compat import note

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"  # of these threads
_MOMENT = 0.002  # seconds
_LIMIT = 1.0  # of the whole wait


@functools.cache
def release_at_end() -> None:
    """Called before the program's first collective: what ends later ends before this, and may communicate."""
    note("comm._last_collectives:process", "atexit")
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
