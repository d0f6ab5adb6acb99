"""``vescale.breakpoint()``: all ranks of a job stop, and one prompt looks at all of them."""

from __future__ import annotations

import contextlib
import io
import linecache
import pdb
import signal
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch.distributed as dist

from vescale.debug._inspection import Inspector
from vescale.debug._prompt import Front
from vescale.debug._prompt_console import Console, SocketConsole, TerminalConsole, terminal_of_this_process
from vescale.debug._stopped_ranks import JobEnded, Session

__all__ = ["breakpoint", "on_exception"]

# How often this rank has come to each breakpoint: ranks that run the same program meet at the same count.
_HITS: Counter[str] = Counter()
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def breakpoint(rank: int | Literal["all"] = 0, when: bool | Callable[[], bool] | None = None) -> None:
    """Stop here, on every rank that comes here, and read commands at one prompt.

    The prompt is on the terminal of the job; where no rank has one, it waits on a Unix socket for ``vescale
    attach``. ``help``
    shows the commands; those of pdb apply to one rank, ``n``, ``s``, ``r`` and ``until`` to all that are stopped.
    ``c`` lets all go
    on; ``q``, Ctrl-C, the end of input, SIGTERM and a lost terminal end every rank. No collective runs but in ``full
    EXPR``; no
    time passes for the hang report. ``PYTHONBREAKPOINT=vescale.breakpoint`` makes it Python's own ``breakpoint()``.

    Args:
        rank: the one in the prompt at first; "all": commands apply to every rank.
        when: a condition; the ranks stop, all of them, where it is true on any. They tell each other through the
        store, and wait
            10 seconds for those that do not come.

    A rank that comes when the others have gone on passes.

    Raises ValueError for a rank that the job does not have.
    """
    frame = sys._getframe(1)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if rank != "all" and not 0 <= rank < size:
        raise ValueError(f"breakpoint: rank is {rank!r}, and the job has {size}; give one of them, or 'all'")
    session = _session(f"{frame.f_code.co_filename}:{frame.f_lineno}")
    if when is not None and not session.vote(bool(when() if callable(when) else when)):
        return
    if session.is_closed:
        return
    RankDebugger(session, rank).set_trace(frame)


@contextlib.contextmanager
def on_exception() -> Iterator[None]:
    """A block whose exceptions stop the job where they were raised: the prompt is on the rank that raised it, with its
    stack. Others that raise one later stop there, too. When the ranks go on, the exception does.

    For a whole program: ``vescale.debug.on_exception().__enter__()``, or the block around ``main()``.
    """
    try:
        yield
    except Exception as error:
        post_mortem(error)
        raise


def post_mortem(error: BaseException) -> None:
    trace = error.__traceback__
    if trace is None:
        return
    session = _session("exception")
    if session.is_closed:
        return
    debugger = RankDebugger(session, session.rank)
    debugger.raised = error
    debugger.reset()
    debugger.interaction(None, trace)


def _session(name: str) -> Session:
    count = _HITS[name]
    _HITS[name] += 1
    return Session(f"{name} {count}")


class RankDebugger(pdb.Pdb):
    """Python's debugger on one rank, whose commands come from the session instead of a terminal."""

    raised: BaseException | None = None

    def __init__(self, session: Session, wanted: int | Literal["all"]) -> None:
        super().__init__(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True, readrc=False)
        self.use_rawinput = False
        self._session, self._wanted = session, wanted
        self._front: Front | None = None

    # A stop

    def interaction(self, frame: types.FrameType | None, traceback: Any) -> None:
        """Python's, without what it says on its own."""
        self.setup(frame, traceback)
        try:
            self._stopped()
        finally:
            self.forget()

    def _stopped(self) -> None:
        with self._ending_on_signals():
            try:
                self._session.stop(self._place(), terminal_of_this_process())
                first = self._session.elect(0 if self._wanted == "all" else self._wanted) == self._session.rank
                while not (self._lead() if first else self._follow()):
                    pass
            except JobEnded as reason:
                if self._front is not None:
                    self._front.close()
                self._session.end(str(reason))
            self._session.go_on()

    def _lead(self) -> bool:
        """True: this rank goes on."""
        if self._front is None:
            self._front = Front(self._session, self._console(), None if self._wanted == "all" else self._prompt_rank())
        if self.raised is not None:
            self._front._console.write(f"\n{type(self.raised).__name__}: {self.raised}\n")
        line = self._front.run(self._answer)
        goes_on = self._resume(line)
        if goes_on and self._session.is_closed:
            self._front.close()
        elif not goes_on:
            self._front._console.write(self._printed())
        return goes_on

    def _resume(self, line: str) -> bool:
        """Whether the rank goes on. It steps where it has stopped, not in the frame that is looked at: ranks stay
        together."""
        if self.curindex != len(self.stack) - 1:
            self._select_frame(len(self.stack) - 1)
        self._printed()
        return bool(self.onecmd(line)) or self.raised is not None

    def _follow(self) -> bool:
        found = self._session.next_command()
        if found is None:
            time.sleep(0.02)
            return False
        number, command = found
        if self._session.rank not in command["ranks"]:
            return False
        if command["kind"] == "resume":
            return self._resume(command["text"])
        self._session.reply(number, self._answer(command["kind"], command["text"]))
        return False

    def _answer(self, kind: str, text: str) -> Any:
        if kind != "pdb":
            return Inspector(self._getval, self._frames()).answer(kind, text)
        self._printed()
        try:
            self.onecmd(text)
        except Exception as error:
            return {"text": f"{self._printed()}*** {type(error).__name__}: {error}\n"}
        return {"text": self._printed()}

    def _printed(self) -> str:
        """What commands have printed since it was asked for."""
        assert isinstance(self.stdout, io.StringIO)
        text = self.stdout.getvalue()
        self.stdout.seek(0)
        self.stdout.truncate()
        return text

    def _frames(self) -> list[tuple[types.FrameType, int]]:
        return self.stack[: self.curindex + 1][::-1]

    def _place(self) -> str:
        frame, number = self.stack[self.curindex]
        code = frame.f_code
        source = linecache.getline(code.co_filename, number, frame.f_globals).strip()
        return f"{code.co_filename}:{number} ({code.co_name})" + (f"  -> {source}" if source else "")

    def _prompt_rank(self) -> int:
        wanted = self._wanted
        assert wanted != "all"
        return wanted if wanted in self._session.stopped() else self._session.rank

    def _console(self) -> Console:
        terminal = terminal_of_this_process()
        if terminal is not None:
            return TerminalConsole(terminal)

        def announce(path: str) -> None:
            text = f"vescale: rank {self._session.rank} has stopped at {self._place()}; on this host: vescale attach {path}"
            print(text, file=sys.stderr, flush=True)

        return SocketConsole(announce)

    @contextlib.contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def end(number: int, _: Any) -> None:
            if self._front is not None:
                with contextlib.suppress(OSError):
                    self._front.close()
            self._session.end(f"{signal.Signals(number).name} at a breakpoint, to rank {self._session.rank}")

        before = {number: signal.signal(number, end) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
