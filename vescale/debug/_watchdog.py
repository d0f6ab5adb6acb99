"""The thread that watches a rank's collectives, and the ranks' reports through the store if one hangs."""

from __future__ import annotations

import atexit
import collections
import contextlib
import io
import json
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from vescale.agreement import PAUSED, ranks_text, wait_limit
from vescale.comm import Observer, Operation, observe
from vescale.compat import note, own_connection
from vescale.debug._locations import Place, main_thread_stack, main_thread_waits, place_of_traceback, running_place
from vescale.debug._stopped_ranks import ProcessIdentity
from vescale.errors import DebugOptionError
from vescale.plans import PlanError
from vescale.runtime import ImplicitCommunicationError

# From the reports of the ranks to one sentence: which ranks did not enter which collective, and where they are.


@dataclass(frozen=True)
class StartedCollective:
    """What one rank reports of a collective that it has started; see :class:`vescale.comm.Operation`."""

    op: str
    number: int
    group: str
    ranks: tuple[int, ...]
    axes: str
    bytes: int
    who: str
    seconds: float
    """How long it has been running; 0 for one that has ended."""
    peer: int | None = None

    @classmethod
    def of(cls, operation: Operation, now: float) -> StartedCollective:
        who = operation.requester or operation.module
        if operation.module and operation.module not in who:
            who = f"{who} in {operation.module}" if who else operation.module
        stage = operation.stage if operation.stage not in who else ""
        phase = ", ".join(part for part in (operation.phase, stage) if part)
        phase = f"({phase})" if phase else ""
        return cls(
            operation.op,
            operation.number,
            operation.group,
            operation.ranks,
            operation.axes,
            operation.bytes,
            " ".join(part for part in (who, phase, operation.line) if part),
            max(0.0, now - operation.began) if operation.ended is None else 0.0,
            operation.peer,
        )

    def text(self) -> str:
        group = f"axis {self.axes!r}" if self.axes else f"ranks {list(self.ranks)}"
        who = f", requested by {self.who}" if self.who else ""
        return f"{self.op} number {self.number} of {group} ({self.bytes} bytes{who})"


@dataclass(frozen=True)
class RankReport:
    """What one rank reports of itself, or what the others know of it.

    Attributes:
        last: the last collective that it started in each group, by the group's name.
        running: those that it waits for, oldest first.
        place, stack: where its main thread is.
        ending: how its program ended, if it has: "normally", or an exception.
        is_answer: whether it is the answer to a request, or an earlier report.
    """

    rank: int
    process: ProcessIdentity
    last: Mapping[str, StartedCollective] = field(default_factory=dict)
    running: Sequence[StartedCollective] = ()
    place: Place = Place(None, "", "")  # noqa: RUF009  # frozen
    stack: str = ""
    ending: str = ""
    is_answer: bool = True

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankReport:
        def collective(fields: Mapping[str, Any]) -> StartedCollective:
            return StartedCollective(**{**fields, "ranks": tuple(fields["ranks"])})

        return cls(
            data["rank"],
            ProcessIdentity(**data["process"]),
            {name: collective(fields) for name, fields in data["last"].items()},
            [collective(fields) for fields in data["running"]],
            Place(**data["place"]),
            data["stack"],
            data["ending"],
            data["is_answer"],
        )

    def whereabouts(self) -> str:
        """``is at train.py:3 (step) in forward of mlp``, or how it ended."""
        if self.ending:
            return f"has ended {self.ending}"
        state = self.process.state()
        number = f"process {self.process.pid} on {self.process.host}"
        known = f"; when it last reported it was at {self.place.text()}" if self.place.line else ""
        if state == "ended":
            return f"is dead ({number}){known}"
        if state == "stopped":
            return f"is stopped by a signal ({number}){known}"
        if not self.is_answer:
            return f"does not respond ({number}){known}"
        return f"is at {self.place.text()}"


def diagnose(reports: Mapping[int, RankReport], silent: Sequence[int] = ()) -> str:
    """One sentence that names the ranks that caused the hang, and why. ``silent``: ranks without any report.

    An exception is reported before a dead process, and that before a collective that some ranks have not entered.
    Exceptions that only follow from the end of another rank are ignored.
    """
    failed = {rank: report for rank, report in sorted(reports.items()) if report.ending.startswith("with ")}
    for rank, report in failed.items():
        if not _is_consequence(report.ending):
            waiting = [c for other in reports.values() for c in other.running]
            then = f"; others wait in {max(waiting, key=lambda c: c.seconds).text()}" if waiting else ""
            return f"rank {rank} {report.whereabouts()}{then}"
    answers = [report for report in reports.values() if report.is_answer]
    waiting = [c for report in answers for c in report.running if c.op not in ("send", "recv")]
    if waiting:
        return _of_collective(max(waiting, key=lambda c: c.seconds), reports)
    gone = [rank for rank, report in reports.items() if report.process.state() == "ended" or not report.is_answer]
    if gone or silent:
        texts = "; ".join(_about(rank, reports.get(rank)) for rank in sorted({*gone, *silent}))
        others = f"; rank {min(failed)} was at {failed[min(failed)].place.text()}" if failed else ""
        return texts + others
    if failed:
        return _about(min(failed), reports[min(failed)])
    # A message of a rank that runs a module is one that it has not waited for: on gloo, a send that has arrived counts
    # as running until it is waited for. For the same reason a receive is the better witness of two ranks.
    waiters = [report for report in answers if report.place.module is None] or answers
    messages = [(report.rank, c) for report in waiters for c in report.running if c.peer is not None]
    if messages:
        return _of_message(*max(messages, key=lambda found: (found[1].op == "recv", found[1].seconds)), reports)
    peers = [c for report in answers for c in report.running]
    return f"a rank waits in {peers[0].text()}" if peers else "a rank had waited for too long, but no longer does"


def _of_collective(stuck: StartedCollective, reports: Mapping[int, RankReport]) -> str:
    visited: set[tuple[str, int]] = set()
    while True:
        visited.add((stuck.group, stuck.number))
        absent = [rank for rank in stuck.ranks if not _has_entered(reports.get(rank), stuck)]
        # A rank that is absent because it waits for other ranks is not the cause.
        held_up = {rank: reports[rank].running for rank in absent if rank in reports and reports[rank].is_answer}
        further = [c for found in held_up.values() for c in found if (c.group, c.number) not in visited]
        further = [c for c in further if c.op not in ("send", "recv")]
        if not further or len([rank for rank in absent if held_up.get(rank)]) < len(absent):
            break
        stuck = max(further, key=lambda c: c.seconds)
    entered = {rank: c for rank, report in reports.items() if (c := _entry(report, stuck)) is not None}
    waits = max((c.seconds for c in entered.values()), default=stuck.seconds)
    if absent:
        there = sorted(set(stuck.ranks) - set(absent))
        return (
            f"{ranks_text(absent)} did not enter {stuck.text()}, in which {ranks_text(there)} "
            f"{'has' if len(there) == 1 else 'have'} waited for {waits:.1f} s: "
            f"{'; '.join(_about(rank, reports.get(rank)) for rank in absent)}"
        )
    kinds: dict[object, list[int]] = {}
    for rank, c in sorted(entered.items()):
        kinds.setdefault((c.op, c.bytes if c.op in _SAME_BYTES else 0), []).append(rank)
    if len(kinds) > 1:
        few, many = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))[:: len(kinds) - 1]
        return (
            f"{ranks_text(few)} entered {entered[few[0]].text()}, and {ranks_text(many)} {entered[many[0]].text()} "
            f"instead: {_about(few[0], reports[few[0]])}"
        )
    bad = [rank for rank in stuck.ranks if reports[rank].process.state() in ("stopped", "ended")]
    if bad:
        texts = "; ".join(_about(rank, reports[rank]) for rank in bad)
        return f"{ranks_text(bad)} entered {stuck.text()} and cannot continue: {texts}"
    return (
        f"all of {ranks_text(sorted(entered))} have entered {stuck.text()}, which has not finished for {waits:.1f} "
        "s: the network or a device is stuck"
    )


def _of_message(waits: int, stuck: StartedCollective, reports: Mapping[int, RankReport]) -> str:
    visited = {waits}
    while True:
        assert stuck.peer is not None
        cause = reports.get(stuck.peer)
        visited.add(stuck.peer)
        # A rank that waits for a third one's message, in no module, is not the cause.
        further = [] if cause is None or not cause.is_answer or cause.place.module is not None else cause.running
        further = [c for c in further if c.peer is not None and c.peer not in visited]
        if not further:
            break
        waits, stuck = stuck.peer, max(further, key=lambda c: (c.op == "recv", c.seconds))
    name = f"axis {stuck.axes!r}" if stuck.axes else f"ranks {list(stuck.ranks)}"
    return (
        f"rank {waits} has waited for rank {stuck.peer} for {stuck.seconds:.1f} s, in a {stuck.op} over {name} "
        f"(requested by {stuck.who}): {_about(stuck.peer, reports.get(stuck.peer))}"
    )


# Operations that move the same number of bytes on every rank.
_SAME_BYTES = ("all_reduce", "broadcast", "reduce")


def _is_consequence(ending: str) -> bool:
    """Whether an exception only follows from the end of another rank."""
    texts = ("closed by peer", "reset by peer", "gloo/", "NCCL", "Broken pipe", "Socket", "RankLost")
    return any(text in ending for text in texts)


def _entry(report: RankReport, stuck: StartedCollective) -> StartedCollective | None:
    """This rank's collective of the same group and number."""
    return next(
        (c for c in (*report.running, *report.last.values()) if (c.group, c.number) == (stuck.group, stuck.number)),
        None,
    )


def _has_entered(report: RankReport | None, stuck: StartedCollective) -> bool:
    if report is None:
        return False
    last = report.last.get(stuck.group)
    return last is not None and last.number >= stuck.number


def _about(rank: int, report: RankReport | None) -> str:
    return f"rank {rank} {report.whereabouts() if report is not None else 'has not reported since the job began'}"


EXIT_CODE = 70  # of every rank that a report ends: EX_SOFTWARE

# Collectives of a watched job have no timeout of their own: the watchdog ends the job, and suspends it at breakpoints.
_NO_TIMEOUT = 7 * 24 * 3600.0
_STACK_BYTES = 20_000
# Errors that are raised on every rank, and how long a rank that has raised one waits for the others to do so, too.
_ON_EVERY_RANK = (PlanError, ImplicitCommunicationError)
_GRACE = 5.0


class HangWatch(Observer):
    """Watches one rank.

    ===================  =============================================================================================
    event                action of a rank's thread
    ===================  =============================================================================================
    every beat           reports (last collective of each group, location of the main thread) under its key; checks for an
                         alarm, and for a breakpoint, which suspends the timeout
    a collective runs    raises the alarm, once for the job
    for ``timeout``
    an exception leaves  reports it, and raises the alarm
    the program
    an alarm             all ranks report; the rank that raised it collects the reports, and prints and writes the sentence
    after the sentence   ends its process, and those on its host that are stopped or do not answer
    ===================  =============================================================================================

    No collective is used. Each rank makes one request to the store a beat, and two that only read.
    """

    def __init__(self, timeout: float, folder: str | os.PathLike[str] | None = None, *, exits: bool = True) -> None:
        self.limit = timeout
        self.timeout = max(_NO_TIMEOUT, timeout)
        self._folder = Path(folder) if folder is not None else Path(os.environ.get("VESCALE_REPORTS", "."))
        self._exits = exits
        self._beat = min(1.0, max(0.1, timeout / 8))
        self._running: collections.deque[Operation] = collections.deque()
        self._last: dict[str, Operation] = {}
        self._ending = ""
        self._place = Place(None, "", "")
        self._resumed = 0.0  # collectives count time from here on
        self._stops = threading.Event()
        self._excepthook = sys.excepthook
        self._unobserve: Callable[[], None] = observe(self)
        note("debug._watchdog:process", "sys.excepthook", "atexit")
        sys.excepthook = self._on_exception
        self._channel: _Channel | None = None
        if dist.is_initialized():  # other ranks know this process from now on
            self._channel = _Channel(dist.get_rank(), dist.get_world_size())
            self._channel.write("beat", self._report(dist.get_rank(), stack=False))
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="vescale hang report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stops.set()
        self._unobserve()
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        atexit.unregister(self._at_exit)

    def pending(self) -> list[str]:
        """The collectives that this rank has started and that have not ended."""
        now = time.time()
        return [StartedCollective.of(o, now).text() for o in list(self._running) if not o.has_ended()]

    # On the program's threads

    def started(self, operation: Operation) -> None:
        place = running_place()
        operation.module, operation.phase, operation.line = place.module or "", place.phase, place.line
        operation.stage = place.stage
        self._running.append(operation)
        if operation.op not in ("send", "recv"):  # of two ranks only; they have no number among the group's
            self._last[operation.group] = operation

    def waits(self, operation: Operation) -> None:
        self.started(operation)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        self._print_exception(kind, error, trace)
        self._place = place_of_traceback(trace)
        summary = str(error).strip().partition("\n")[0][:500]
        ending = f"with {kind.__name__}: {summary} (at {self._place.text()})"
        sys.stdout.flush()
        sys.stderr.flush()
        if self._channel is None and dist.is_initialized():  # since less than a beat
            self._channel = _Channel(dist.get_rank(), dist.get_world_size())
        if isinstance(error, _ON_EVERY_RANK) and self._channel is not None and self._channel.all_end(_GRACE):
            self._stops.set()  # each rank has raised the error itself
            return
        self._ending = ending
        if self._channel is not None and not self._stops.is_set():  # the watchdog's thread will end the process
            self._stops.wait(self._beat * 4 + 10.0)

    def _print_exception(
        self, kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        """Of a watch that began before ``init_process_group``, the hook is called by PyTorch's, which collects what is
        printed and adds the rank to each line afterwards: too late, if the process is ended meanwhile."""
        if not isinstance(sys.stderr, io.StringIO):
            self._excepthook(kind, error, trace)
            return
        with contextlib.redirect_stderr(io.StringIO()) as text:
            self._excepthook(kind, error, trace)
        prefix = f"[rank{dist.get_rank()}]: " if dist.is_initialized() else ""
        _say("\n".join(prefix + line for line in text.getvalue().splitlines()))

    def _at_exit(self) -> None:
        """The end of the program: ranks that wait for this rank are notified."""
        if self._channel is not None and not self._stops.is_set():
            self._stops.set()
            self._ending = self._ending or "normally"
            with contextlib.suppress(RuntimeError):
                self._channel.write("beat", self._report(self._channel.rank, stack=False))

    # On the watchdog's thread

    def _watch(self) -> None:
        while not dist.is_initialized():
            if self._stops.wait(self._beat):
                return
        channel = self._channel = self._channel or _Channel(dist.get_rank(), dist.get_world_size())
        lost = 0
        while not self._stops.is_set():
            try:
                self._step(channel)
                lost = 0
            except RuntimeError as error:  # the store is gone with its host, a rank or the launcher
                lost += 1
                if lost >= 3 and (self._hung() is not None or self._ending):
                    _say(f"vescale: the job's store has ended ({error}), and rank {channel.rank} waits")
                    self._end(channel, {})
            self._stops.wait(0.02 if self._ending else self._beat)

    def _step(self, channel: _Channel) -> None:
        channel.write("beat", self._report(channel.rank, stack=False))
        if not channel.is_initialized_still():
            return
        if channel.is_paused():
            self._resumed = time.time()
            return
        hung = self._hung()
        if hung is not None or self._ending:
            channel.raise_alarm()
        leader = channel.alarm()
        if leader is None:
            return
        channel.write("report", self._report(channel.rank, stack=True))
        if leader == channel.rank:
            reports, silent = channel.collect(min(5.0, 3 * self._beat + 1.0))
            sentence = diagnose(reports, silent)
            channel.set_verdict(sorted({*silent, *(r for r, x in reports.items() if not x.is_answer)}))
            self._write(channel, sentence, reports)
            _say(f"vescale: {sentence}")
        else:
            _say(f"vescale: rank {channel.rank} ends with code {EXIT_CODE}; rank {leader} says why")
        silent_ranks = channel.verdict(10.0)
        if silent_ranks is None:
            silent_ranks = [leader]
            _say(f"vescale: rank {leader} found a hanging collective, and has reported nothing else")
        self._end(channel, {rank: channel.read("beat", rank) for rank in silent_ranks})

    def _hung(self) -> Operation | None:
        """The oldest collective that has run for longer than the timeout."""
        while self._running and self._running[0].has_ended():
            self._running.popleft()
        now = time.time()
        for operation in list(self._running):
            is_late = now - max(operation.began, self._resumed) > self.limit
            if is_late and not operation.has_ended() and (not operation.is_mute or main_thread_waits()):
                return operation
        return None

    def _report(self, rank: int, *, stack: bool) -> RankReport:
        now, text = time.time(), ""
        if not self._ending:
            self._place, text = main_thread_stack()
        running = [StartedCollective.of(o, now) for o in list(self._running) if not o.has_ended()]
        last = {name: StartedCollective.of(operation, now) for name, operation in list(self._last.items())}
        text = text[-_STACK_BYTES:] if stack else ""
        return RankReport(rank, ProcessIdentity.own(), last, running, self._place, text, self._ending)

    def _write(self, channel: _Channel, sentence: str, reports: dict[int, RankReport]) -> None:
        lines = [sentence, ""]
        for rank, report in sorted(reports.items()):
            lines += [f"--- rank {rank} of {channel.size} {report.whereabouts()}"]
            lines += [f"waits in {c.text()} for {c.seconds:.1f} s" for c in report.running]
            lines += [f"last in its group: {c.text()}" for c in report.last.values()]
            lines += [report.stack, ""]
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"vescale-hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
            path.write_text("\n".join(lines))
            _say(f"vescale: the stacks of all ranks are in {path}")

    def _end(self, channel: _Channel, silent: dict[int, RankReport | None]) -> None:
        if not self._exits:
            self._stops.set()
            return
        for report in silent.values():
            if report is not None and report.rank != channel.rank:
                report.process.kill()
        if channel.rank == channel.alarmed_by:
            time.sleep(0.2)  # this rank may host the store that others are reading
        sys.stdout.flush()
        os._exit(EXIT_CODE)


def _say(text: str) -> None:
    """Print to the program's standard error, not to what PyTorch collects while it handles an exception."""
    stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    print(text, file=stream, flush=True)


class _Channel:
    """The ranks' keys in the store, over a separate connection: another thread may be waiting on the default one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._world = dist.group.WORLD
        self._store = own_connection()
        self.alarmed_by: int | None = None

    def is_initialized_still(self) -> bool:
        return dist.is_initialized()

    def write(self, kind: str, report: RankReport) -> None:
        self._store.set(f"vescale watch {kind} {self.rank}", json.dumps(report.to_json()))

    def read(self, kind: str, rank: int) -> RankReport | None:
        key = f"vescale watch {kind} {rank}"
        return RankReport.from_json(json.loads(self._store.get(key))) if self._store.check([key]) else None

    def all_end(self, seconds: float) -> bool:
        """Whether all ranks come here within this time."""
        deadline = time.monotonic() + seconds
        found = self._store.add("vescale watch raised", 1)
        while found < self.size and time.monotonic() < deadline and self.alarmed_by is None:
            time.sleep(0.02)
            found = self._store.add("vescale watch raised", 0)
        return bool(found >= self.size)

    def is_paused(self) -> bool:
        return self._store.add(PAUSED, 0) > 0

    def raise_alarm(self) -> None:
        self._store.compare_set("vescale watch alarm", "", str(self.rank))

    def alarm(self) -> int | None:
        """The rank that has raised the alarm."""
        if self.alarmed_by is None and self._store.check(["vescale watch alarm"]):
            self.alarmed_by = int(self._store.get("vescale watch alarm"))
        return self.alarmed_by

    def collect(self, seconds: float) -> tuple[dict[int, RankReport], list[int]]:
        """Reports of all ranks, older ones of ranks that do not answer; and the ranks without any report."""
        deadline = time.monotonic() + seconds
        found: dict[int, RankReport] = {}
        while len(found) < self.size and time.monotonic() < deadline:
            for rank in range(self.size):
                if rank not in found and (report := self.read("report", rank)) is not None:
                    found[rank] = report
            time.sleep(0.02)
        silent = []
        for rank in sorted(set(range(self.size)) - set(found)):
            earlier = self.read("beat", rank)
            if earlier is None:
                silent.append(rank)
            else:
                found[rank] = RankReport(**{**earlier.__dict__, "is_answer": False})
        return found, silent

    def set_verdict(self, silent: list[int]) -> None:
        self._store.set("vescale watch verdict", json.dumps(silent))

    def verdict(self, seconds: float) -> list[int] | None:
        """The ranks that did not answer; None: nobody has written it within ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._store.check(["vescale watch verdict"]):
                return list(json.loads(self._store.get("vescale watch verdict")))
            time.sleep(0.02)
        return None


# ``hang_report``: ends a job that hangs, with a report that names the cause.


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
