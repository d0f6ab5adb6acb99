"""At the end of a program, threads of gloo get the interpreter's lock before the interpreter ends."""

from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from vescale.comm import _ledger

_SET_NAME = 15  # of prctl


def test_a_thread_of_gloo_has_let_go_of_all_tensors() -> None:
    """It needs the lock once for each, and gets it again and again, also where nobody else asks the main thread for it."""
    released, ready, over = [], threading.Event(), threading.Event()

    def run() -> None:
        ctypes.CDLL(None).prctl(_SET_NAME, b"pt_gloo_runloop", 0, 0, 0)
        ready.set()
        for number in range(30):
            time.sleep(0.001)  # gives up the lock, and takes it again
            released.append(number)
        over.wait()

    thread = threading.Thread(target=run)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        thread.start()
        ready.wait()
        _ledger._release()
        assert len(released) == 30
    finally:
        over.set()
        sys.setswitchinterval(interval)
        thread.join()


def test_a_thread_that_works_on_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ledger, "_threads", lambda: {"1": ("R", str(time.monotonic()))})
    begin = time.monotonic()
    _ledger._release()
    assert time.monotonic() - begin < 5 * _ledger._LIMIT
