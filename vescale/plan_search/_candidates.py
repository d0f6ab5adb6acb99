"""Which choices a search looks at, and those that the numbers of ranks, rows, blocks and experts rule out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vescale.plan_search._choice import Choice, Model
from vescale.plan_search._sources import PlanSource
from vescale.plan_search._stages import schedule_of
from vescale.plans import PlanError

CHECKPOINTS = ("none", "selective", "full")
_CONTEXT_RANKS = 8  # the most that a search looks at
_CONTEXT_PIECES = 8  # runs of the sequence for each rank, in the plans of the zoo
_ROUNDS = (1, 2, 4, 8)  # micro-batches for each stage
_STAGES = 16  # the most that a search looks at; half of it with two on each rank


@dataclass(frozen=True)
class Rejected:
    """A choice that is not proposed, or a group of them, with the reason.

    Attributes:
        what: the choice as plain data, or the part of it that rules it out.
        rule: ``mesh``, ``batch``, ``plan``, ``memory``, ``slower`` or ``lint``.
        reason: the reason, as a sentence.
        needed_bytes: what it needs on a device, if that is more than the device has; otherwise None.
    """

    what: dict[str, Any]
    rule: str
    reason: str
    needed_bytes: int | None = None


@dataclass(frozen=True)
class Family:
    """Choices with the same cuts of tensors, without checkpointing."""

    source: PlanSource
    tp: int
    cp: int
    ep: int
    choices: tuple[Choice, ...]


def families(
    devices: int,
    rows: int,
    length: int | None,
    model: Model,
    sources: tuple[PlanSource, ...],
    ranks_per_node: int,
    no_stages: str | None,
) -> Iterator[Family | Rejected]:
    """Those of a number of devices, each with the choices that its numbers allow.

    Args:
        devices: all of them are used.
        rows: of the batch; ``length``: of a row, where the batch has sequences.
        model: its blocks and experts.
        sources: of plans: the first with parts of sequences between the parts of layers, the second without.
        ranks_per_node: the most ranks of ``tp``.
        no_stages: why the model cannot be cut into stages; None: it can.
    """
    if no_stages is not None and devices > 1:
        yield Rejected({"mesh": {"pp": "2 or more"}}, "plan", no_stages)
    for tp in _divisors(devices):
        if tp > ranks_per_node:
            reason = f"tensor parallelism stays within a host, and a host has {ranks_per_node} devices"
            yield Rejected({"mesh": {"tp": tp}}, "mesh", reason)
            continue
        for source in sources if tp > 1 else sources[:1]:
            for cp in _divisors(devices // tp):
                why = _context(source, cp, length)
                if why is not None:
                    yield Rejected({"mesh": {"cp": cp, "tp": tp}, "source": source.name}, "mesh", why)
                    continue
                for ep in _divisors(devices // tp // cp) if model.experts and cp == 1 else (1,):
                    if ep > 1 and (model.num_experts % (ep * tp) or ep > model.num_experts):
                        reason = f"{model.num_experts} experts are not a multiple of {ep * tp} ranks"
                        yield Rejected({"mesh": {"ep": ep, "tp": tp}}, "mesh", reason)
                        continue
                    found: list[Choice] = []
                    for one in _of_mesh(source, devices // tp // cp // ep, rows, model, tp, cp, ep, no_stages is None):
                        if isinstance(one, Rejected):
                            yield one
                        else:
                            found.append(one)
                    if found:
                        yield Family(source, tp, cp, ep, tuple(found))


def _context(source: PlanSource, cp: int, length: int | None) -> str | None:
    if cp == 1:
        return None
    if source.context is None:
        return f"the source {source.name} has no plan that shards the sequence in attention"
    if length is None or length % (_CONTEXT_PIECES * cp):
        return (
            f"the sequence of {length} is not a multiple of {_CONTEXT_PIECES * cp}: {_CONTEXT_PIECES} runs for each "
            "rank"
        )
    if cp > _CONTEXT_RANKS:
        return f"search tries at most {_CONTEXT_RANKS} ranks of context parallelism"
    return None


def _of_mesh(
    source: PlanSource, rest: int, rows: int, model: Model, tp: int, cp: int, ep: int, has_stages: bool
) -> Iterator[Choice | Rejected]:
    """Stages, and ranks of data, of ``rest`` ranks."""
    for pp in _divisors(rest):
        data = rest // pp
        mesh = Choice(source, pp=pp, dp=data, cp=cp, ep=ep, tp=tp)
        if pp > 1 and not has_stages:
            continue
        if pp > min(model.num_blocks, _STAGES) and pp > 1:
            reason = f"{model.num_blocks} blocks are fewer than {pp} stages"
            if pp <= model.num_blocks:
                reason = f"search tries at most {_STAGES} stages"
            yield Rejected({"mesh": {"pp": pp, "cp": cp, "ep": ep, "tp": tp}}, "mesh", reason)
            continue
        if rows % (data * ep):
            reason = f"a batch of {rows} rows is not a multiple of {data * ep} ranks of data"
            yield Rejected(mesh.describe(), "batch", reason)
            continue
        if pp == 1:
            yield from _with_zero(mesh)
            continue
        own = rows // (data * ep)
        counts = [pp * n for n in _ROUNDS if own % (pp * n) == 0]
        if not counts:
            reason = f"{own} rows of a rank cannot be split into at least {pp} micro-batches, one for each stage"
            yield Rejected(mesh.describe(), "batch", reason)
        for schedule in ("1F1B", "Interleaved1F1B"):
            per_rank = 2 if schedule.startswith("Interleaved") else 1
            if pp * per_rank > min(model.num_blocks, _STAGES):
                continue
            for count in counts:
                try:
                    schedule_of(schedule, pp, per_rank, count)
                except PlanError as error:
                    yield Rejected({**mesh.describe(), "schedule": schedule}, "mesh", str(error))
                    continue
                for zero in (0, 3) if data > 1 else (0,):
                    yield Choice(source, pp, 1, data, cp, ep, tp, zero, "none", schedule, count)


def _with_zero(mesh: Choice) -> Iterator[Choice]:
    data = mesh.dp
    for zero in range(4) if data > 1 else (0,):
        yield Choice(mesh.source, dp=data, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp, zero=zero)
    for part in _divisors(data):
        if 1 < part < data:
            yield Choice(mesh.source, replicas=data // part, dp=part, cp=mesh.cp, ep=mesh.ep, tp=mesh.tp, zero=3)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)
