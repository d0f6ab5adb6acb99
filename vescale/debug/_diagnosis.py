"""From the reports of the ranks to one sentence: which ranks did not enter which collective, and where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vescale.comm import Operation
from vescale.debug._job_processes import ProcessIdentity
from vescale.debug._locations import Place

__all__ = ["RankReport", "StartedCollective", "diagnose"]


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
        who = f", asked for by {self.who}" if self.who else ""
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
            return f"does not answer ({number}){known}"
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
    return f"a rank waits in {peers[0].text()}" if peers else "a rank has waited for too long, and does not any more"


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
            f"{_ranks_text(absent)} did not enter {stuck.text()}, in which {_ranks_text(there)} "
            f"{'has' if len(there) == 1 else 'have'} waited for {waits:.1f} s: "
            f"{'; '.join(_about(rank, reports.get(rank)) for rank in absent)}"
        )
    kinds: dict[object, list[int]] = {}
    for rank, c in sorted(entered.items()):
        kinds.setdefault((c.op, c.bytes if c.op in _SAME_BYTES else 0), []).append(rank)
    if len(kinds) > 1:
        few, many = sorted(kinds.values(), key=lambda ranks: (len(ranks), -ranks[0]))[:: len(kinds) - 1]
        return (
            f"{_ranks_text(few)} entered {entered[few[0]].text()}, and {_ranks_text(many)} "
            f"{entered[many[0]].text()} in its place: {_about(few[0], reports[few[0]])}"
        )
    bad = [rank for rank in stuck.ranks if reports[rank].process.state() in ("stopped", "ended")]
    if bad:
        texts = "; ".join(_about(rank, reports[rank]) for rank in bad)
        return f"{_ranks_text(bad)} entered {stuck.text()} and cannot go on: {texts}"
    return (
        f"all of {_ranks_text(sorted(entered))} have entered {stuck.text()}, and it has not ended for {waits:.1f} s: the "
        "network or a device is stuck"
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
        f"(asked for by {stuck.who}): {_about(stuck.peer, reports.get(stuck.peer))}"
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
    return f"rank {rank} {report.whereabouts() if report is not None else 'has reported nothing since the job began'}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
