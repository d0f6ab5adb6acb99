"""``vescale.breakpoint()``: stops all ranks of a job at one prompt."""

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

from vescale.compat import note
from vescale.debug._inspection import Inspector
from vescale.debug._locations import running_stage
from vescale.debug._prompt import Prompt
from vescale.debug._prompt_console import Console, SocketConsole, TerminalConsole, terminal_of_this_process
from vescale.debug._running_prompt import RunningPrompt
from vescale.debug._stopped_ranks import JobEnded, Session
from vescale.errors import DebugOptionError

__all__ = ["breakpoint", "on_exception"]

# How often this rank has come to each breakpoint: ranks that run the same program meet at the same count.
_HITS: Counter[str] = Counter()
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def breakpoint(rank: int | Literal["all"] = 0, when: bool | Callable[[], bool] | None = None) -> None:
    """Stop every rank that comes here, and read commands at one prompt.

    The prompt is on the terminal of the job. If no rank has a terminal, it is on a Unix socket, to which ``vescale
    attach`` connects. ``help`` shows the commands. Those of pdb apply to one rank; ``n``, ``s``, ``r`` and ``until``
    apply to all stopped ranks. ``c`` resumes all ranks; ``q``, Ctrl-C, the end of input, SIGTERM and a lost terminal end
    all of them. No command but ``full EXPR`` runs a collective, and the timeout of the hang report is suspended. With
    ``PYTHONBREAKPOINT=vescale.breakpoint``, Python's ``breakpoint()`` calls this function.

    Args:
        rank: the rank to which commands apply at first; "all": every rank.
        when: a condition; if it is true on any rank, all ranks stop. They exchange it through the store, and wait 10
            seconds for ranks that do not come.

    A rank that comes after the others have resumed does not stop. In a pipeline, the ranks of one stage stop together, in
    each micro-batch; those of other stages that come meanwhile stop when these have resumed.

    Raises ValueError for a rank that the job does not have.
    """
    frame = sys._getframe(1)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if rank != "all" and not 0 <= rank < size:
        raise DebugOptionError(f"breakpoint: rank is {rank!r}, and the job has {size}; give one of them, or 'all'")
    stage, ranks = running_stage(frame)
    name = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    session = _session(f"{name} {stage}" if stage else name)
    if when is not None and not session.vote(bool(when() if callable(when) else when), ranks or range(size)):
        return
    if session.is_closed:
        return
    RankDebugger(session, rank).set_trace(frame)


@contextlib.contextmanager
def on_exception() -> Iterator[None]:
    """A context whose exceptions stop the job where they were raised: the prompt is on the rank that raised the
    exception, with its stack. Ranks that raise one later stop there, too. After the ranks resume, the exception
    propagates.

    For a whole program: ``vescale.debug.on_exception().__enter__()``, or the context around ``main()``.
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
    """Python's debugger on one rank. Its commands come from the session instead of a terminal."""

    raised: BaseException | None = None

    def __init__(self, session: Session, wanted: int | Literal["all"]) -> None:
        super().__init__(stdin=io.StringIO(), stdout=io.StringIO(), nosigint=True, readrc=False)
        self.use_rawinput = False
        self._session, self._wanted = session, wanted
        self._front: Prompt | None = None
        self._running: RunningPrompt | None = None
        self._is_released = False  # the prompt has let all ranks go on while this one was running

    # A stop

    def interaction(self, frame: types.FrameType | None, traceback: Any) -> None:
        """Python's, without the lines that it prints."""
        self.setup(frame, traceback)
        try:
            self._stopped()
        finally:
            self.forget()

    def _stopped(self) -> None:
        with self._ending_on_signals():
            try:
                self._session.take_turn()
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
        """Read commands at the prompt. True: this rank resumes."""
        if self._running is not None:
            self._running.end()
            self._running = None
            if self._is_released:
                return self._resume("c")
        if self._front is None:
            self._front = Prompt(self._session, self._console(), None if self._wanted == "all" else self._prompt_rank())
        if self.raised is not None:
            self._front._console.write(f"\n{type(self.raised).__name__}: {self.raised}\n")
        line = self._front.run(self._answer)
        goes_on = self._resume(line)
        if goes_on and not self._session.is_closed and self.raised is None:
            self._running = RunningPrompt(self._session, self._front, self._release)
        if goes_on and self._session.is_closed:
            self._front.close()
        elif not goes_on:
            self._front._console.write(self._printed())
        return goes_on

    def _release(self) -> None:
        self._is_released = True

    def _resume(self, line: str) -> bool:
        """Whether the rank resumes. It steps in the frame where it stopped, not in the frame that is shown, so that ranks
        stay together."""
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
        """What commands have printed since the last call."""
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
        stage = running_stage(frame)[0]
        return (
            f"{code.co_filename}:{number} ({code.co_name})"
            + (f" in {stage}" if stage else "")
            + (f"  -> {source}" if source else "")
        )

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

        note("debug._breakpoint:process", *(number.name for number in _SIGNALS))
        before = {number: signal.signal(number, end) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
