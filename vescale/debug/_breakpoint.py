"""``vescale.breakpoint()``: stops all ranks of a job at one prompt."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import pdb
import signal
import sys
import threading
import time
import types
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale.compat import bytes_of, no_torch_function, note, own_part
from vescale.debug._locations import place_of_frames, running_stage
from vescale.debug._prompt import (
    GOES_ON,
    QUITS,
    RESUMES,
    Console,
    Prompt,
    SocketConsole,
    TerminalConsole,
    terminal_of_this_process,
)
from vescale.debug._stopped_ranks import JobEnded, Session
from vescale.debug._watchdog import the_watch
from vescale.errors import DebugOptionError, kind_of

# Requests to a stopped rank: values of expressions, checksums of their parts, and the rank's location.

_SHOWN = 400  # characters of a value in a table
_NUM_BLOCKS = 64


class Inspector:
    """Answers requests about one frame, whose debugger evaluates expressions. Every answer is JSON."""

    def __init__(self, evaluate: Callable[[str], Any], frames: list[tuple[types.FrameType, int]]) -> None:
        self._value, self._frames = evaluate, frames

    def answer(self, kind: str, text: str) -> Any:
        """``{"error": ...}`` if the expression raises."""
        try:
            with no_torch_function(), torch.no_grad():
                return getattr(self, f"_{kind}")(text)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _all(self, expression: str) -> Any:
        text = repr(self._value(expression))
        return {"text": text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."}

    def _summary(self, expression: str) -> Any:
        value = self._value(expression)
        if not isinstance(value, torch.Tensor):
            return {"type": type(value).__name__, "text": repr(value)[:_SHOWN]}
        local = own_part(value)
        found = {
            "type": type(value).__name__,
            "shape": list(value.shape),
            "local shape": list(local.shape),
            "dtype": str(value.dtype),
            "requires_grad": value.requires_grad,
            "part": "",
            "placements": "",
            "checksum": zlib.crc32(_bytes(local)),
            "numel": local.numel(),
        }
        if isinstance(value, DTensor):
            names = value.device_mesh.mesh_dim_names or tuple(map(str, range(value.device_mesh.ndim)))
            coordinate = value.device_mesh.get_coordinate() or [0] * len(names)
            found["placements"] = ", ".join(f"{name}={p}" for name, p in zip(names, value.placements))
            # Ranks that differ only on axes that replicate hold the same elements.
            found["part"] = str([c for c, p in zip(coordinate, value.placements) if not p.is_replicate()])
        return found

    def _blocks(self, text: str) -> Any:
        """Checksums of equal parts of a range of a tensor's elements; the elements themselves if they are few."""
        request = json.loads(text)
        value = self._value(request["expression"])
        local = own_part(value).detach().reshape(-1)
        begin, end = request["range"]
        if end - begin <= _NUM_BLOCKS:
            return {"values": [repr(x) for x in local[begin:end].tolist()]}
        size = -(-(end - begin) // _NUM_BLOCKS)
        return {
            "size": size,
            "sums": [zlib.crc32(_bytes(local[i : min(i + size, end)])) for i in range(begin, end, size)],
        }

    def _specification(self, expression: str) -> Any:
        value = self._value(expression)
        if not isinstance(value, DTensor):
            return {"error": f"{expression} is {kind_of(value)}, not a DTensor; use p or all"}
        mesh = value.device_mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        placements = ", ".join(f"{name}={p}" for name, p in zip(names, value.placements))
        return {
            "ranks": mesh.mesh.flatten().tolist(),
            "text": f"shape {tuple(value.shape)}, {value.dtype}, {placements}",
        }

    def _full(self, expression: str) -> Any:
        """Collective: all ranks of the tensor's mesh call it."""
        return {"text": str(self._value(expression).full_tensor())}

    def _where(self, _: str) -> Any:
        place = place_of_frames(self._frames)
        program = None
        if "vescale.runtime" in sys.modules:
            from vescale.runtime import locate

            where = locate()
            if where is not None:
                program = where.runtime.program
                place = type(place)(where.path, where.phase, place.line, place.stage)
        lines = [f"at {place.text()}"]
        if program is not None:
            own = [i for i in program if i.path == place.module]
            lines += [f"  plan: {i.text(program.axes)}" + (f"  ({i.source})" if i.source else "") for i in own]
            if not own:
                lines.append("  plan: nothing for this module")
        watch = the_watch()
        if watch is None:
            lines.append("  pending collectives: unknown (recorded only while vescale.debug.hang_report() is on)")
        else:
            pending = watch.pending()
            lines += [f"  pending: {text}" for text in pending] or ["  pending collectives: none"]
        return {"text": "\n".join(lines)}


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(bytes_of(tensor.detach().cpu()).numpy().tobytes())


# The prompt while its own rank is running: a step over a line that only some ranks run waits for the others.

_PATIENCE = 2.0  # seconds, which a line may take without a word


class _Stopped(Exception):
    """This rank has stopped again."""


class RunningPrompt:
    """Reads commands for the other ranks, on a thread, from the time that this rank has been running for a while until it
    stops again (:meth:`end`).

    Args:
        resumes: called when ``c`` lets all ranks go on: this one should not stop again.
    """

    def __init__(self, session: Session, prompt: Prompt, resumes: Callable[[], None]) -> None:
        self._session, self._prompt, self._resumes = session, prompt, resumes
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vescale prompt", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """This rank has stopped: the console is free when this returns."""
        self._has_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        if self._has_stopped.wait(_PATIENCE):
            return
        current, shown = self._prompt.current, ""
        try:
            while True:
                text = self._prompt.running_text()
                if text != shown:
                    shown = text
                    self._prompt.write(text)
                if self._session.stopped() and not self._command():
                    return
                self._poll()
                time.sleep(0.1)
        except _Stopped:
            self._prompt.write("\n")
        except JobEnded as reason:
            self._session.end(str(reason))
        except RuntimeError:  # the job has come to its end, and its store with it
            pass
        finally:
            self._prompt.current = current

    def _poll(self) -> None:
        if self._has_stopped.is_set():
            raise _Stopped
        self._prompt.poll()

    def _command(self) -> bool:
        """Read and execute one; False: all ranks go on."""
        stopped = self._session.stopped()
        if self._prompt.current is not None and self._prompt.current not in stopped:
            self._prompt.current = stopped[0]
        line = self._prompt.read(self._poll)
        command = line.partition(" ")[0]
        if command in QUITS:
            self._prompt.quit()
        if command in RESUMES:
            goes_on = command in GOES_ON
            if goes_on:
                self._session.close()
                self._resumes()
            self._prompt.resume(line)
            if not goes_on:
                self._prompt.await_others()  # ranks that wait for each other meet meanwhile
            return not goes_on
        if command:
            self._prompt.execute(line)
        return True


# How often this rank has come to each breakpoint: ranks that run the same program meet at the same count.
_HITS: Counter[str] = Counter()
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _is_tried() -> bool:
    """Whether a pipeline tries the rows of two micro-batches, before its first step."""
    pipeline = sys.modules.get("vescale.pipeline")
    run = pipeline.current_run() if pipeline is not None else None
    return run is not None and run.is_trial


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
    if _is_tried():
        return
    frame = sys._getframe(1)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if rank != "all" and not 0 <= rank < size:
        raise DebugOptionError(
            f"breakpoint: rank is {rank!r}, but the job has {size} ranks; pass one of them, or 'all'"
        )
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
