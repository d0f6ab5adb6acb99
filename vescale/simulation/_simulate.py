"""``simulate``: run a training script as some ranks of a job, without devices and without the other ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vescale.agreement import first_difference
from vescale.errors import SimulationError
from vescale.simulation._tracer import COMPARISON, NEW_GROUP, Collective, Ending, RankRecord, ranks_text

# Compares the collectives of simulated ranks: which differ, which wait for each other, which wait forever.

_Key = tuple[str, tuple[int, ...]]
_GROUPS = "call new_group() and init_device_mesh() on all ranks, in the same order, including for groups of other ranks"


@dataclass
class Finding:
    """What would stop a job.

    Attributes:
        kind: ``mismatch``: ranks call different collectives in one place; ``deadlock``: ranks wait for each other;
            ``never-comes``: ranks wait for one that does not come; ``error``: a program failed.
        ranks: those concerned.
        at: the line of the program.
        text: a sentence.
    """

    kind: str
    ranks: list[int]
    at: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"kind": self.kind, "ranks": self.ranks, "at": self.at, "text": self.text}


@dataclass
class _Place:
    """Where ranks meet: a collective of a group, by its number, or a message."""

    came: dict[int, Collective] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    is_mismatched: bool = False

    def lacks(self) -> list[int]:
        return sorted(self.needed - self.came.keys())


class _Replay:
    """Ranks go through their records, each until it waits for a rank that has not come. Ranks that were not simulated
    always come."""

    def __init__(self, records: Mapping[int, RankRecord]) -> None:
        self.records = records
        self.steps = {rank: _steps(record) for rank, record in records.items()}
        self.position = dict.fromkeys(records, 0)
        self.places: dict[Any, _Place] = defaultdict(_Place)
        self.place_of: dict[tuple[int, int], _Place] = {}
        self._counts: dict[Any, int] = defaultdict(int)
        self._from_any: dict[tuple[_Key, int], list[tuple[int, int]]] = defaultdict(list)
        self.mismatches: list[_Place] = []

    def run(self) -> None:
        moves = True
        while moves:
            moves = sum(self._advance(rank) for rank in self.records) > 0

    def waits_at(self, rank: int) -> int | None:
        """The number of the collective that a rank waits for."""
        steps, position = self.steps[rank], self.position[rank]
        return ~steps[position] if position < len(steps) else None

    def _advance(self, rank: int) -> bool:
        steps, begin = self.steps[rank], self.position[rank]
        while self.position[rank] < len(steps):
            step = steps[self.position[rank]]
            if step < 0:
                place = self.place_of.get((rank, ~step))
                if place is None or place.is_mismatched or place.lacks():
                    break
            else:
                self._start(rank, step)
            self.position[rank] += 1
        return self.position[rank] > begin

    def _start(self, rank: int, number: int) -> None:
        one = self.records[rank].calls[number]
        key: _Key = (one.group, tuple(one.ranks))
        if one.op == "recv" and one.peer is None:
            self._from_any[key, rank].append((rank, number))
            self.place_of[rank, number] = _Place({rank: one}, {r for r in one.ranks if r in self.records})
            self._serve_any(key, rank)
        elif one.is_message:
            ends = (rank, one.peer) if one.op == "send" else (one.peer, rank)
            self._come(("message", key, ends, self._next((one.op, key, ends))), rank, number, {rank, one.peer})
            if one.op == "send":
                self._serve_any(key, int(one.peer or 0))
        elif one.op == NEW_GROUP:
            self._come((one.op, one.group), rank, number, set(one.ranks))
        elif one.op == COMPARISON:  # the same ranks compare several times under one name, each time after the other
            self._come((one.op, one.group, self._next((one.op, one.group, rank))), rank, number, set(one.ranks))
        else:
            self._come((key, self._next((key, rank))), rank, number, set(one.ranks))

    def _serve_any(self, key: _Key, rank: int) -> None:
        """Receives from any rank take messages in the order in which the replay meets them."""
        waiting = self._from_any[key, rank]
        outside = [r for r in key[1] if r not in self.records]
        while waiting:
            sent = [
                (place, where)
                for place, where in list(self.places.items())
                if where
                and place[0] == "message"
                and place[1] == key
                and place[2][1] == rank
                and rank not in where.came
            ]
            if not sent and not outside:
                return
            _, number = waiting.pop(0)
            if sent:
                name = sent[0][0]
                self._next(("recv", key, name[2]))
                self._come(name, rank, number, {rank, name[2][0]})
            else:
                self.place_of[rank, number] = _Place({rank: self.records[rank].calls[number]}, {rank})

    def _next(self, counter: Any) -> int:
        self._counts[counter] += 1
        return self._counts[counter] - 1

    def _come(self, name: Any, rank: int, number: int, ranks: Iterable[int | None]) -> None:
        place = self.places[name]
        one = self.records[rank].calls[number]
        first = next(iter(place.came.values()), None)
        place.came[rank] = one
        place.needed |= {r for r in ranks if r is not None and r in self.records}
        self.place_of[rank, number] = place
        if first is not None and not place.is_mismatched and not _agree(first, one):
            place.is_mismatched = True
            self.mismatches.append(place)


def _steps(record: RankRecord) -> list[int]:
    """The order, with waits for what the program did not wait for where it ends normally."""
    waited = {~step for step in record.order if step < 0}
    rest = [~n for n in range(len(record.calls)) if n not in waited]
    return [*record.order, *rest] if record.ending.how == "normally" else list(record.order)


def _agree(first: Collective, other: Collective) -> bool:
    if first.is_message or other.is_message:
        return first.agreed == other.agreed
    if first.op == NEW_GROUP == other.op:
        return first.ranks == other.ranks
    common = first.agreed.keys() & other.agreed.keys()
    return first.op == other.op and all(first.agreed[name] == other.agreed[name] for name in common)


def find(records: Mapping[int, RankRecord]) -> list[Finding]:
    """All findings, first causes only: a rank that waits for one that has failed is named with the failure."""
    replay = _Replay(records)
    replay.run()
    stuck = {rank: number for rank in records if (number := replay.waits_at(rank)) is not None}
    mixed = {rank for place in replay.mismatches for rank in place.came}
    found = [_mismatch(place) for place in replay.mismatches]
    failed = _failures(records)
    waiting: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for rank in stuck:
        if rank not in mixed:
            waiting[_cause(rank, stuck, replay, mixed, records)].append(rank)
    for (kind, about), ranks in waiting.items():
        if kind == "deadlock":
            found.append(_deadlock(about, stuck, records))
        elif kind == "ended":
            found.append(_never_comes(about, ranks, stuck, replay, records))
        elif kind == "failed" and about in failed:
            one = records[ranks[0]].calls[stuck[ranks[0]]]
            failed[about].text += f"; {_ranks(ranks)} would wait for it in {one.text()}"
    return [*found, *{id(finding): finding for finding in failed.values()}.values()]


def _cause(
    rank: int, stuck: dict[int, int], replay: _Replay, mixed: set[int], records: Mapping[int, RankRecord]
) -> tuple[str, Any]:
    """Why a rank waits: follows the first rank that has not come, until one that does not wait, or a circle."""
    path = [rank]
    while True:
        own = path[-1]
        place = replay.place_of.get((own, stuck[own]))
        lacks = place.lacks() if place is not None else []
        if not lacks:
            return "known", None
        other = next((r for r in lacks if r not in stuck), lacks[0])
        if other in mixed:
            return "known", None
        if other not in stuck:
            if records[other].ending.how != "normally":
                return "failed", other
            return "ended", (other, id(place))
        if other in path:
            return "deadlock", tuple(sorted(path[path.index(other) :]))
        path.append(other)


def _failures(records: Mapping[int, RankRecord]) -> dict[int, Finding]:
    """By rank; ranks with one error share a finding."""
    found: dict[tuple[str, str, str], Finding] = {}
    by_rank: dict[int, Finding] = {}
    for rank, record in records.items():
        ending = record.ending
        if ending.how == "normally":
            continue
        key = (ending.how, ending.text, ending.at)
        if key not in found:
            kind = "never-comes" if ending.how == "never-comes" else "error"
            found[key] = Finding(kind, [], ending.at, "")
        found[key].ranks.append(rank)
        by_rank[rank] = found[key]
    for (_, text, at), finding in found.items():
        finding.text = f"{_ranks(finding.ranks)}: {text}{f', at {at}' if at else ''}"
    return by_rank


def _mismatch(place: _Place) -> Finding:
    kinds: list[tuple[list[int], Collective]] = []
    for rank, one in sorted(place.came.items()):
        same = next((ranks for ranks, other in kinds if _agree(other, one) and other.site == one.site), None)
        if same is None:
            kinds.append(([rank], one))
        else:
            same.append(rank)
    parts = [f"{_ranks(ranks)} {'calls' if len(ranks) == 1 else 'call'} {one.text()}" for ranks, one in kinds[:3]]
    first = kinds[0][1]
    if first.is_message:
        rule = "what is sent and what is received must have the same size and dtype"
    elif first.op == COMPARISON:
        rule = _difference(kinds)
    elif first.op == NEW_GROUP:
        rule = f"their groups have the same name; {_GROUPS}"
    else:
        rule = "all ranks of a group must call the same collectives, of the same sizes, in the same order"
    return Finding("mismatch", sorted(place.came), first.site, f"{', where '.join(parts)}; {rule}")


def _difference(kinds: list[tuple[list[int], Collective]]) -> str:
    """What differs between descriptions, by the ranks that have them."""
    first = kinds[0][1]
    for section in first.agreed:
        own = {rank: one.agreed.get(section) for ranks, one in kinds for rank in ranks}
        if all(isinstance(found, list) for found in own.values()):
            entries = {rank: [(name, text) for name, text in found or ()] for rank, found in own.items()}
            if len({tuple(found) for found in entries.values()}) > 1:
                return f"they differ: {first_difference(section, entries).text()}"
        elif len({str(found) for found in own.values()}) > 1:
            return f"they differ in {section}"
    return "they differ"


def _deadlock(ranks: tuple[int, ...], stuck: dict[int, int], records: Mapping[int, RankRecord]) -> Finding:
    parts = [f"rank {rank} waits in {records[rank].calls[stuck[rank]].text()}" for rank in ranks[:4]]
    more = f", and {len(ranks) - 4} other ranks wait" if len(ranks) > 4 else ""
    first = records[ranks[0]].calls[stuck[ranks[0]]]
    text = f"{', '.join(parts)}{more}: they wait for each other forever"
    if any(records[rank].calls[stuck[rank]].op == NEW_GROUP for rank in ranks):
        return Finding("deadlock", list(ranks), first.site, f"{text}; {_GROUPS}")
    reason = next((why for rank in ranks[1:] if (why := _other_group(first, records[rank]))), "")
    return Finding("deadlock", list(ranks), first.site, f"{text}{f'; rank {ranks[1]} {reason}' if reason else ''}")


def _other_group(one: Collective, record: RankRecord) -> str:
    """Whether a rank has used a group of the same ranks, but never that of a collective: why, else ""."""
    others = [c for c in record.collectives if c.ranks == one.ranks and c.axis == one.axis]
    if one.is_message or not others or any(c.group == one.group for c in others):
        return ""
    return (
        f"used another group of these ranks ({others[0].group!r}, not {one.group!r}), because it created a different "
        f"number of groups before; {_GROUPS}"
    )


def _never_comes(
    about: tuple[int, int], ranks: list[int], stuck: dict[int, int], replay: _Replay, records: Mapping[int, RankRecord]
) -> Finding:
    late = about[0]
    direct = [r for r in ranks if late in replay.place_of[r, stuck[r]].lacks()] or ranks
    one = records[direct[0]].calls[stuck[direct[0]]]
    absent = [r for r in replay.place_of[direct[0], stuck[direct[0]]].lacks() if replay.waits_at(r) is None]
    text = f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} forever in {one.text()}: {_ranks(absent)} "
    if one.is_message:
        text += f"ended without the {'recv' if one.op == 'send' else 'send'} that matches it"
    elif one.op == NEW_GROUP:
        text += f"ended without it; {_GROUPS}"
    else:
        text += _other_group(one, records[late]) or "ended without it"
    return Finding("never-comes", sorted({*ranks, *absent}), one.site, text)


def _ranks(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}"


@dataclass
class Simulation:
    """What simulated ranks have done.

    Attributes:
        world_size: ranks of the job.
        ranks: by rank; those asked for, and those whose values they needed.
        findings: what would stop the job.
        logs: by rank, what its program has printed.
    """

    world_size: int
    ranks: dict[int, RankRecord]
    findings: list[Finding]
    logs: dict[int, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data: ``ranks`` by rank, and ``findings``."""
        return {
            "ranks": {
                str(rank): {
                    "collectives": [
                        {"op": c.op, "axis": c.axis, "ranks": c.ranks, "bytes": c.bytes, "site": c.site}
                        for c in record.collectives
                    ],
                    "peak_bytes": record.peak_bytes,
                    "peak_at": record.peak_at,
                    "categories": record.categories,
                    "host_seconds": record.host_seconds,
                }
                for rank, record in sorted(self.ranks.items())
            },
            "findings": [finding.to_json() for finding in self.findings],
        }


@dataclass(frozen=True)
class Job:
    """A script to simulate; see :func:`simulate`."""

    script: str | os.PathLike[str]
    args: Sequence[str] = ()
    world_size: int = 1
    ranks: Sequence[int] = (0,)
    ranks_per_node: int = 8
    timeout: float = 300.0

    def config(self, folder: Path) -> dict[str, Any]:
        path = Path(self.script)
        if not path.is_file():
            raise SimulationError(f"there is no script {os.fspath(self.script)}")
        wrong = [rank for rank in self.ranks if not 0 <= rank < self.world_size]
        if wrong or not self.ranks:
            raise SimulationError(
                f"ranks {wrong} are not ranks of a job of {self.world_size}; pass numbers from 0 to "
                f"{self.world_size - 1}"
            )
        return {
            "script": str(path),
            "args": list(self.args),
            "world_size": self.world_size,
            "ranks": sorted(set(self.ranks)),
            "ranks_per_node": min(self.ranks_per_node, self.world_size),
            "timeout": self.timeout,
            "folder": str(folder),
        }


def simulate(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    world_size: int,
    ranks: Sequence[int],
    ranks_per_node: int = 8,
    timeout: float = 300.0,
) -> Simulation:
    """Run ``script``, unmodified, once for each of ``ranks``, each in a process that is this rank of ``world_size``.

    No devices and no other ranks are needed: collectives move nothing, but are recorded, and ops on large tensors compute
    nothing. Small tensors and objects that simulated ranks exchange have their values; those of other ranks are taken to be
    the own ones. The script's own effects (files, network) are real.

    Args:
        args: of the script.
        ranks_per_node: from which ``LOCAL_RANK`` follows.
        timeout: seconds that a rank may run, without its waits for others.

    Raises:
        ValueError: no such script; a rank outside of the job.
        RuntimeError: the simulation's own process failed.
    """
    return simulate_jobs([Job(script, args, world_size, ranks, ranks_per_node, timeout)])[0]


def simulate_jobs(jobs: Sequence[Job]) -> list[Simulation]:
    """Several simulations, one after another, for which torch is loaded once."""
    with tempfile.TemporaryDirectory(prefix="vescale-simulate-") as name:
        folders = [Path(name) / str(number) for number in range(len(jobs))]
        configs = [job.config(folder) for job, folder in zip(jobs, folders)]
        for folder in folders:
            folder.mkdir()
        file = Path(name) / "jobs.json"
        file.write_text(json.dumps(configs))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "vescale.simulation._server", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SimulationError(f"the simulation ended with {done.returncode}:\n{done.stderr}")
        return [_read(job, folder) for job, folder in zip(jobs, folders)]


def _read(job: Job, folder: Path) -> Simulation:
    logs = {int(path.stem[5:]): path.read_text(errors="replace") for path in folder.glob("rank_*.log")}
    records = {}
    for rank in sorted(logs):
        result = folder / f"rank_{rank}.json"
        if result.exists():
            records[rank] = RankRecord.from_json(json.loads(result.read_text()))
        else:
            text = "its process was ended: it crashed, ran out of memory, or did not end in time"
            records[rank] = RankRecord(rank, ending=Ending("error", text))
    return Simulation(job.world_size, records, find(records), logs)
