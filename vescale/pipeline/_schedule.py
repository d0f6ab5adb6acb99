"""``Schedule``: the order of computations of all ranks, as data, checked by a dry run."""

from __future__ import annotations

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from vescale.compat.pipelining import dry_run, schedule_class, schedule_from_text, schedule_order, schedule_with_comms
from vescale.errors import ScheduleError
from vescale.plans import PipelineEntry, PlanError

# Time of a computation, with a forward as 1: a full backward, the gradient of inputs, that of weights.
DURATIONS = {"F": 1, "B": 2, "I": 1, "W": 1}
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


class Action(NamedTuple):
    """``2F0``: the forward of stage 2 for micro-batch 0. Kinds: F forward, B backward, I and W its halves."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class _PaperStage:
    """What schedules read of a stage, without a process group."""

    def __init__(self, index: int, num_stages: int, rank: int, num_ranks: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


@dataclass(frozen=True)
class Schedule:
    """The computations of each rank along the pipeline's axis, in order.

    Attributes:
        actions: by rank.
        starts: when each begins, on paper: a forward takes 1, a backward 2, half a backward 1, a message 0.
        rank_of: of each stage.
    """

    name: str
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]
    starts: tuple[tuple[int, ...], ...]
    rank_of: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.rank_of)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)

    @property
    def length(self) -> int:
        """The time of a step."""
        return max(s[-1] + DURATIONS[a[-1].kind] for s, a in zip(self.starts, self.actions))

    @property
    def bubble(self) -> float:
        """The part of the step's time in which a rank waits, on average."""
        busy = sum(DURATIONS[action.kind] for actions in self.actions for action in actions)
        return 1.0 - busy / (self.length * len(self.actions))

    @property
    def peak(self) -> tuple[int, ...]:
        """For each rank, the most forwards whose backward has not ended."""
        found = []
        for actions in self.actions:
            alive = most = 0
            for action in actions:
                alive += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                most = max(most, alive)
            found.append(most)
        return tuple(found)

    def held_together(self, rank: int) -> list[dict[int, int]]:
        """How many forwards of each stage of a rank are held for backward, at the moments of a step at which no other moment
        has as many of each stage."""
        alive, found = Counter(dict.fromkeys(self.stages_of(rank), 0)), []
        for stage, kind, _ in self.actions[rank]:
            alive[stage] += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
            found.append(dict(alive))
        distinct = [one for n, one in enumerate(found) if one not in found[:n]]
        return [one for one in distinct if not any(_covers(other, one) for other in distinct if other is not one)]

    def held_forwards(self, stage: int) -> int:
        """The most forwards of the stage whose backward has not ended."""
        alive = most = 0
        for action in self.actions[self.rank_of[stage]]:
            if action.stage == stage:
                alive += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                most = max(most, alive)
        return most

    def messages(self) -> dict[int, Counter[str]]:
        """For each stage, the messages of a step: ``sends`` and ``receives`` of one tensor each, to another rank."""
        counts: dict[int, Counter[str]] = {stage: Counter() for stage in range(self.num_stages)}
        for actions in self.actions:
            for stage, kind, _ in actions:
                if kind == "W":
                    continue
                source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
                for other, what in ((source, "receives"), (target, "sends")):
                    if 0 <= other < self.num_stages and self.rank_of[other] != self.rank_of[stage]:
                        counts[stage][f"{'forward' if kind == 'F' else 'backward'}_{what}"] += 1
        return counts

    def to_csv(self) -> str:
        """The form that ``schedule=`` of a plan takes."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.actions)

    def draw(self, columns: int = 100_000) -> str:
        """A line for each rank, a column for each unit of time; dots where it waits.

        Args:
            columns: of characters; a longer schedule is continued in lines below.
        """
        width = max(len(str(action)) for actions in self.actions for action in actions) + 1
        rows = []
        for actions, starts in zip(self.actions, self.starts):
            cells = ["."] * self.length
            for action, start in zip(actions, starts):
                cells[start] = str(action)
                for more in range(1, DURATIONS[action.kind]):
                    cells[start + more] = "-"
            rows.append([cell.ljust(width) for cell in cells])
        titles = [f"rank {rank}: " for rank in range(len(rows))]
        most = max(1, (columns - len(titles[-1])) // width)
        parts = []
        for start in range(0, self.length, most):
            lines = (title + "".join(cells[start : start + most]) for title, cells in zip(titles, rows))
            parts.append("".join(line.rstrip() + "\n" for line in lines))
        return "\n".join(parts)


def _covers(many: Mapping[int, int], few: Mapping[int, int]) -> bool:
    return all(many[stage] >= number for stage, number in few.items())


def make_schedule(entry: PipelineEntry, num_ranks: int, num_stages: int) -> Schedule:
    """The schedule of an entry, for ``num_stages`` stages on ``num_ranks`` ranks. No process group is needed.

    Raises PlanError for numbers that the schedule does not take, and for one that deadlocks.

    Args:
        entry: what ``Plan.pipeline`` has added: ``plan.pipeline_entry``.
    """
    m, name = entry.microbatches, "CSV" if entry.schedule_is_text else entry.schedule

    def refuse(problem: str) -> PlanError:
        return ScheduleError(f"pipeline: schedule {name}: {problem}", entry.source)

    if num_stages % num_ranks or num_stages < num_ranks:
        raise refuse(
            f"{num_stages} stages for {num_ranks} ranks along {entry.mesh!r}; split the model into a multiple of "
            f"{num_ranks}"
        )
    per_rank = num_stages // num_ranks
    if name in ("GPipe", "1F1B") and per_rank != 1:
        raise refuse(
            f"it runs one stage on each rank, but the model is split into {num_stages} stages for {num_ranks} ranks; "
            f"split it into {num_ranks}, or use Interleaved1F1B"
        )
    if name in ("ZBVZeroBubble", "DualPipeV") and per_rank != 2:
        raise refuse(f"it runs exactly 2 stages on each rank; split the model into {2 * num_ranks}, not {num_stages}")
    least = {"1F1B": num_stages, "DualPipeV": num_stages}.get(name, 1)
    if m < least:
        raise refuse(f"{m} micro-batches for {num_stages} stages; use microbatches={least} or more, or use GPipe")
    rounds = max(1, m // num_ranks)
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and m % rounds:
        raise refuse(
            f"{m} micro-batches on {num_ranks} ranks; their number must be a multiple of {rounds} rounds ({num_ranks} "
            f"ranks fit into it {rounds} times): use a multiple of {num_ranks}"
        )
    if name in ("GPipe", "1F1B"):
        one_each = {stage: stage for stage in range(num_stages)}
        order_of = _gpipe if name == "GPipe" else _one_forward_one_backward
        actions = tuple(tuple(order_of(stage, num_stages, m)) for stage in range(num_stages))
        return Schedule(name, m, actions, _timed(actions, one_each, refuse), tuple(one_each))
    if entry.schedule_is_text:
        _check_text(entry, num_ranks, num_stages, refuse)
    stages: list[Any] = [_PaperStage(rank, num_stages, 0, num_ranks) for rank in range(per_rank)]
    try:
        made = build(entry, stages, loss=None)
        order = schedule_order(made)
        actions = tuple(tuple(_flat(order[rank])) for rank in range(num_ranks))
        rank_of = _ranks_of(order, num_stages)
        with contextlib.redirect_stdout(io.StringIO()):
            dry_run(schedule_with_comms(order, rank_of.__getitem__, num_stages), rank_of.__getitem__, num_stages)
    except (AssertionError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise refuse(f"it cannot run: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error
    losses = [a.microbatch for a in actions[rank_of[num_stages - 1]] if a.kind == "F" and a.stage == num_stages - 1]
    if losses != list(range(m)):
        raise refuse(
            f"the last stage processes micro-batches {', '.join(map(str, losses))}; write 0 to {m - 1} in order, "
            "because torch.distributed.pipelining collects losses in that order"
        )
    starts = _timed(actions, rank_of, refuse)
    return Schedule(name, m, actions, starts, tuple(rank_of[stage] for stage in range(num_stages)))


def _check_text(entry: PipelineEntry, num_ranks: int, num_stages: int, refuse: Callable[[str], PlanError]) -> None:
    """Mistakes that PyTorch reports without the edit, or not at all."""
    lines = entry.schedule.strip().splitlines()
    if len(lines) != num_ranks:
        raise refuse(
            f"it has {len(lines)} lines for {num_ranks} ranks along {entry.mesh!r}; write one line for each rank"
        )
    cells = Counter(cell for line in lines for cell in map(str.strip, line.split(",")) if cell)
    for cell, number in cells.items():
        if number > 1:
            raise refuse(f"it contains {cell} more than once; write each computation once, on one rank")
        stage = re.match(r"\d+", cell)
        if stage is not None and int(stage[0]) >= num_stages:
            raise refuse(f"{cell!r} is of stage {stage[0]}, but the model is split into stages 0 to {num_stages - 1}")


def _gpipe(stage: int, num_stages: int, m: int) -> list[Action]:
    """What ``ScheduleGPipe`` runs."""
    return [Action(stage, kind, mb) for kind in "FB" for mb in range(m)]


def _one_forward_one_backward(stage: int, num_stages: int, m: int) -> list[Action]:
    """What ``Schedule1F1B`` runs. (The order that it returns for drawings begins with another micro-batch on the last
    stage in torch 2.13.)"""
    warmup = min(m, num_stages - stage)
    found = [Action(stage, "F", mb) for mb in range(warmup)]
    for mb in range(m):
        found.append(Action(stage, "B", mb))
        if warmup + mb < m:
            found.append(Action(stage, "F", warmup + mb))
    return found


def build(entry: PipelineEntry, stages: list[Any], loss: Any) -> Any:
    """The schedule object of ``torch.distributed.pipelining`` for the stages of one rank."""
    if entry.schedule_is_text:
        return schedule_from_text(entry.schedule.strip() + "\n", stages, entry.microbatches, loss)
    cls = schedule_class(entry.schedule)
    given = stages[0] if entry.schedule in ("GPipe", "1F1B") else stages
    return cls(given, entry.microbatches, loss_fn=loss, scale_grads=False)


def _flat(actions: Any) -> Any:
    for action in actions:
        if action is None:
            continue
        for each in action.sub_actions or (action,):
            yield Action(each.stage_index, _KINDS[each.computation_type.name], each.microbatch_index)


def _ranks_of(order: Mapping[int, Any], num_stages: int) -> dict[int, int]:
    found = {action.stage: rank for rank, actions in order.items() for action in _flat(actions)}
    missing = [stage for stage in range(num_stages) if stage not in found]
    if missing or len(found) != num_stages:
        raise ValueError(f"it has stages {sorted(found)}, but the model has stages 0 to {num_stages - 1}")
    return found


def _timed(actions: Any, rank_of: Mapping[int, int], refuse: Any) -> tuple[tuple[int, ...], ...]:
    """When each action begins. Raises PlanError for a deadlock."""
    last = len(rank_of) - 1
    ends: dict[tuple[int, str, int], int] = {}
    positions, clocks = [0] * len(actions), [0] * len(actions)
    starts: list[list[int]] = [[] for _ in actions]
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(actions):
            while positions[rank] < len(own):
                stage, kind, mb = own[positions[rank]]
                needs = []
                if kind == "F" and stage > 0:
                    needs.append((stage - 1, "F", mb))
                elif kind in "BI":
                    needs.append((stage, "F", mb))
                    if stage < last:
                        needs.append((stage + 1, "I", mb))
                elif kind == "W":
                    needs.append((stage, "I", mb))
                if any(need not in ends for need in needs):
                    break
                begin = max([clocks[rank], *(ends[need] for need in needs)])
                clocks[rank] = begin + DURATIONS[kind]
                ends[stage, "I" if kind == "B" else kind, mb] = clocks[rank]
                starts[rank].append(begin)
                positions[rank] += 1
                progress = True
    waiting = [f"rank {r} before {own[p]}" for r, (own, p) in enumerate(zip(actions, positions)) if p < len(own)]
    if waiting:
        raise refuse(f"it deadlocks: {', '.join(waiting)} wait for each other")
    return tuple(map(tuple, starts))


# A schedule as one HTML page without external assets: a row for each rank, a column for each unit of time.

_WIDTH, _HEIGHT, _LEFT, _TOP = 30, 26, 64, 24
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px system-ui, sans-serif; margin: clamp(.8rem, 3vw, 2rem); } p { max-width: 60rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right; white-space: nowrap }
th { border-bottom: 1px solid #8888 } td:first-child, th:first-child { text-align: left }
.scroll { overflow-x: auto } svg { font: 11px system-ui, sans-serif }
svg text { fill: currentColor } svg .in { fill: #111 } svg rect { stroke: #fff8 }
.legend span { display: inline-block; padding: .1rem .5rem; margin: 0 .5rem .3rem 0; color: #111 }
"""
_ACTION_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def schedule_page(
    schedule: Schedule, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> str:
    """``head`` and ``rows``: a table that stands above the drawing, and ``note`` below it. Empty
    fields are times at which a rank waits.

    Args:
        schedule: what :func:`make_schedule` returned.
        title: of the page.
    """
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    used = {action.kind for actions in schedule.actions for action in actions}
    legend = "".join(
        f'<span style="background:{_color(0, kind, 1)}">{kind} {name}, {DURATIONS[kind]}</span>'
        for kind, name in _ACTION_NAMES.items()
        if kind in used
    )
    facts = (
        f"{schedule.num_stages} stages on {len(schedule.actions)} ranks, {schedule.num_microbatches} micro-batches; "
        f"{schedule.length} units of time, during which a rank is idle for {schedule.bubble:.1%} on average; at most "
        f"{', '.join(map(str, schedule.peak))} forwards are held for backward (by rank)."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<p>{facts}</p>\n"
        f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>\n<p>{escape(note)}</p>\n'
        f'<p class="legend">{legend} Each field: the stage, the kind, the micro-batch; shades tell stages apart.</p>\n'
        f'<div class="scroll">{_drawing(schedule)}</div>\n</body></html>\n'
    )


def _drawing(schedule: Schedule) -> str:
    width = _LEFT + schedule.length * _WIDTH + 8
    height = _TOP + len(schedule.actions) * _HEIGHT + 4
    step = max(1, -(-schedule.length // 24))
    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="schedule {escape(schedule.name)}">']
    parts += [f'<text x="{_LEFT + t * _WIDTH}" y="14">{t}</text>' for t in range(0, schedule.length + 1, step)]
    for rank, (actions, starts) in enumerate(zip(schedule.actions, schedule.starts)):
        top = _TOP + rank * _HEIGHT
        parts.append(f'<text x="0" y="{top + 17}">rank {rank}</text>')
        for action, start in zip(actions, starts):
            left, long = _LEFT + start * _WIDTH, DURATIONS[action.kind] * _WIDTH
            color = _color(action.stage, action.kind, schedule.num_stages)
            what = f"{_ACTION_NAMES[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}, at {start}"
            parts.append(
                f'<g><title>{what}</title><rect x="{left}" y="{top}" width="{long}" height="{_HEIGHT - 2}" fill="{color}"/>'
                f'<text class="in" x="{left + long / 2}" y="{top + 16}" text-anchor="middle">{action}</text></g>'
            )
    return "".join((*parts, "</svg>"))


def _color(stage: int, kind: str, num_stages: int) -> str:
    hue = {"F": 210, "B": 140, "I": 140, "W": 45}[kind]
    return f"hsl({hue} 60% {86 - 30 * stage // max(1, num_stages)}%)"


# Which stages of a rank have their parameters gathered (ZeRO units), and until when.

MAX_RESIDENT = 3


def releases(actions: Sequence[Action], max_resident: int = MAX_RESIDENT) -> dict[Action, tuple[int, ...]]:
    """For actions of one rank, the stages whose parameters are let go before them: those that are not among the next
    ``max_resident`` stages that compute. A stage is gathered again by its next action. (What the runtime of
    ``torch.distributed.pipelining`` does with ``UNSHARD`` and ``RESHARD``.) A stage stays between the halves of a backward.
    """
    resident: list[int] = []
    halved: list[int] = []  # the stages of backwards whose second half is still to come
    found = {}
    for position, action in enumerate(actions):
        soon: list[int] = []
        for later in actions[position:]:
            if later.stage not in soon:
                soon.append(later.stage)
                if len(soon) == max_resident:
                    break
        gone = tuple(stage for stage in resident if stage not in soon and stage not in halved)
        if gone:
            found[action] = gone
        resident = [stage for stage in resident if stage not in gone]
        if action.kind == "I":
            halved.append(action.stage)
        elif action.kind == "W":
            halved.remove(action.stage)
        if action.stage not in resident:
            resident.append(action.stage)
    return found
