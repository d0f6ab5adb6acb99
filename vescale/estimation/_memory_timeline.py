"""Memory by category at each instant of a rehearsal, with the modules that were left out of it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vescale.estimation._bucket_gradients import BucketGradient
from vescale.estimation._memory_log import Block, Instant
from vescale.estimation._rehearsal import Rehearsal
from vescale.ir import Repeats

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "unsharded",
    "communication",
    "activations",
    "temporary",
    "input",
    "rounding",
)
_AT_REST = ("parameters", "gradients", "optimizer", "unsharded")
_FORWARD, _BACKWARD = ("forward", "loss"), ("backward", "recompute")
_HOST, _WAITING = "host", "waiting"


@dataclass(frozen=True)
class OpenBlock:
    """Memory of one category and module, from one instant to another, ``count`` times while no module that it stands for
    runs."""

    block: Block
    category: str
    module: str | None
    repeats: Repeats | None


@dataclass(frozen=True)
class Moment:
    """The most that consecutive instants of one kind need."""

    at: str
    num_bytes: int
    categories: dict[str, int]


@dataclass
class MemoryTimeline:
    """Bytes by category at each instant.

    Attributes:
        instants: of the rehearsal.
        categories: by name, an array over the instants.
        total: their sum.
        blocks: what they consist of.
        waiting: of these bytes, gradients of the first step that wait for the buckets which are made at its end.
        on_host: bytes in the host's memory, which are in no category; ``host_share``: of the parameters.
    """

    instants: list[Instant]
    categories: dict[str, np.ndarray]
    total: np.ndarray
    blocks: list[OpenBlock] = field(repr=False, default_factory=list)
    waiting: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(1, dtype=np.int64))
    on_host: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(1, dtype=np.int64))
    host_share: float = 0.0

    def peak_of(self, step: int) -> int:
        """The instant of a step at which memory is highest."""
        numbers = np.array([i for i, instant in enumerate(self.instants) if instant.step == step])
        return int(numbers[np.argmax(self.total[numbers])])

    def end_of_forward(self, step: int) -> int:
        """The last instant of a step's forward; of a pipeline, of its last one."""
        return max(n for n, i in enumerate(self.instants) if i.step == step and i.phase in _FORWARD)

    def at(self, instant: int) -> dict[str, int]:
        return {name: int(found[instant]) for name, found in self.categories.items()}

    def largest(self, step: int) -> dict[str, int]:
        """The maximum of each category in a step, which need not be at one instant."""
        numbers = [i for i, instant in enumerate(self.instants) if instant.step == step]
        return {name: int(found[numbers].max()) for name, found in self.categories.items()}

    def activations(self, instant: int) -> dict[str, int]:
        """By module, those that are there at an instant; the modules that were left out among them."""
        found: dict[str, int] = {}
        for one in self.blocks:
            if one.category != "activations" or not _is_there(one.block, instant):
                continue
            own = one.module if one.module is not None else "loss"
            paths = [own]
            now, began = self.instants[instant], self.instants[one.block.begin]
            if one.repeats is not None and not (one.repeats.holds(now.module) and now.run == began.run):
                rest = own.removeprefix(one.repeats.stand_in)
                paths = [path + rest for path in one.repeats.paths()]
            for path in paths:
                found[path] = found.get(path, 0) + one.block.num_bytes
        return dict(sorted(found.items()))

    def moments(self, step: int, depth: int = 3) -> list[Moment]:
        """The step as a list of moments; ``depth``: of the modules that are told apart."""
        found: list[Moment] = []
        numbers: list[int] = []

        def close(label: str) -> None:
            best = numbers[int(np.argmax(self.total[numbers]))]
            found.append(Moment(label, int(self.total[best]), self.at(best)))

        last = ""
        for number, instant in enumerate(self.instants):
            if instant.step != step:
                continue
            label = label_of(instant, depth)
            if label != last and numbers:
                close(last)
                numbers = []
            last = label
            numbers.append(number)
        if numbers:
            close(last)
        return found


def label_of(instant: Instant, depth: int = 99) -> str:
    module = ".".join((instant.module or "").split(".")[:depth])
    where = f" of stage {instant.stage}, micro-batch {instant.microbatch}" if instant.stage is not None else ""
    return f"{instant.phase}{where} {module}".rstrip()


def timeline_of(rehearsal: Rehearsal, repeats: Sequence[Repeats], rounding: int = 1) -> MemoryTimeline:
    """``rounding``: the allocator's blocks are multiples of so many bytes."""
    log = rehearsal.log
    number = len(log.instants)
    ends = _ends_of_forwards(log.instants)
    inside = [_ranges_inside(r, log.instants) for r in repeats]
    changes = {name: np.zeros(number + 1, dtype=np.int64) for name in (*CATEGORIES, _HOST, _WAITING)}
    slots = {one.name: one for one in rehearsal.in_buckets if not one.is_scattered}
    parameters = {False: 0, True: 0}  # by whether they are on the host
    found = []
    first_bucket = min(
        (b.begin for b in log.blocks if b.end is None and _kind_of(b, rehearsal) == "gradients"), default=-1
    )
    for block in log.blocks:
        category, module = _category(block, rehearsal, ends)
        is_kept = block.end is None  # what waits for a bucket is freed when it is there
        waits = (
            category == "temporary" and not is_kept and _is_there(block, first_bucket) and block.begin != first_bucket
        )
        category = "gradients" if waits and log.instants[block.begin].phase in _BACKWARD else category
        is_message = category == "communication" and log.instants[block.begin].phase == "backward"
        awaits = category == "temporary" and _awaits_reduction(block, log.instants)
        stays = category in _AT_REST[:3] or awaits or (_is_there_at_any(block, ends) and not is_message)
        # A gradient that is sent to the stage before is of the first module alone, whatever forwards run until it has left;
        # units use the memory of gradients that are not reduced yet one after another, unless later backwards add to them.
        if category == "gradients" and block.storage not in rehearsal.holders and not waits:
            stays = _outlives_run(block, log.instants)
        held = _held_bytes(block, category, module, rehearsal, repeats, slots) if stays else []
        runs = [(n, sum(size for path, size in held if r.holds(path))) for n, r in enumerate(repeats)]
        own = next((repeats[n] for n, size in runs if size), None)
        is_on_host = block.storage in log.on_host
        if category == "parameters" and block.end is None:
            parameters[is_on_host] += block.num_bytes + sum(size * (repeats[n].count - 1) for n, size in runs)
        end = block.end if block.end is not None else number
        padding = -block.num_bytes % rounding if not is_on_host else 0
        kind, category = category, _HOST if is_on_host else category
        found.append(OpenBlock(block, category, module, own))
        waiting = block.num_bytes if waits and kind == "gradients" else 0
        for name, size in ((category, block.num_bytes), ("rounding", padding), (_WAITING, waiting)):
            changes[name][block.begin] += size
            changes[name][end] -= size
        for n, held_bytes in runs:
            if held_bytes:
                ranges = _ranges_of_others(block, end, "gradients" if awaits else kind, inside[n], log.instants)
                for name, size in ((category, held_bytes), ("rounding", padding), (_WAITING, waiting)):
                    for first, last in ranges:
                        changes[name][first] += size * (repeats[n].count - 1)
                        changes[name][last] -= size * (repeats[n].count - 1)
    categories = {name: np.cumsum(changes[name])[:-1] for name in CATEGORIES}
    total: Any = sum(categories.values())
    share = parameters[True] / max(sum(parameters.values()), 1)
    waiting_bytes, on_host = (np.cumsum(changes[name])[:-1] for name in (_WAITING, _HOST))
    return MemoryTimeline(log.instants, categories, total, found, waiting_bytes, on_host, share)


def _held_bytes(
    block: Block,
    category: str,
    module: str | None,
    rehearsal: Rehearsal,
    repeats: Sequence[Repeats],
    slots: Mapping[str, BucketGradient],
) -> Sequence[tuple[str | None, int]]:
    """Whose memory a block is: (module, bytes). Gradients of several modules may be in one block. ``slots``: those that
    buckets have room for, by name; some are elsewhere when they have been reduced."""
    holders = rehearsal.holders.get(block.storage) if category == "gradients" else None
    if holders is None:
        return [(module, block.num_bytes)]
    paths = {path for path, _ in holders.values()}
    if len(paths) == 1 or any(all(r.holds(path) for path in paths) for r in repeats):
        return [(min(paths), block.num_bytes)]  # padding and what buckets have taken over belong to it
    found = [(path, max(size, slots[name].itemsize if name in slots else 0)) for name, (path, size) in holders.items()]
    buckets = {slots[name].bucket for name in holders if name in slots}
    elsewhere = [one for name, one in slots.items() if one.bucket in buckets and name not in holders]
    return found + [(one.module, one.numel * one.itemsize) for one in elsewhere]


def _kind_of(block: Block, rehearsal: Rehearsal) -> str | None:
    known = rehearsal.kinds.get(block.storage)
    return known[0] if known is not None else None


def _category(block: Block, rehearsal: Rehearsal, ends: Sequence[int]) -> tuple[str, str | None]:
    known = rehearsal.kinds.get(block.storage)
    instant = rehearsal.log.instants[block.begin]
    if known is not None:
        return known
    if instant.phase in _FORWARD and _is_there_at_any(block, ends):
        return "activations", instant.module
    if block.is_communicated:
        return "communication", instant.module
    if instant.phase == "recompute" and _outlives_module(block, rehearsal.log.instants):
        return "activations", instant.module
    return "temporary", instant.module


def _outlives_module(block: Block, instants: Sequence[Instant]) -> bool:
    """Whether the block is there after the recomputation that made it."""
    if block.end is None:
        return True
    return instants[block.end].phase != "recompute"


def _awaits_reduction(block: Block, instants: Sequence[Instant]) -> bool:
    """Whether the block is a gradient that is there until buckets are reduced, which is outside of all modules."""
    if block.end is None or instants[block.begin].phase not in _BACKWARD:
        return False
    end = instants[block.end]
    return end.phase in _BACKWARD and end.module is None and end.run == instants[block.begin].run


def _outlives_run(block: Block, instants: Sequence[Instant]) -> bool:
    """Whether the block is there in another forward or backward of the same step."""
    begin, end = instants[block.begin], instants[min(block.end or len(instants), len(instants)) - 1]
    return begin.step == end.step and begin.run != end.run


def _ends_of_forwards(instants: Sequence[Instant]) -> list[int]:
    """The last instant of each forward, in ascending order."""
    return sorted({i.run: n for n, i in enumerate(instants) if i.phase in _FORWARD}.values())


def _ranges_inside(repeats: Repeats, instants: Sequence[Instant]) -> dict[Any, list[tuple[int, int]]]:
    """By forward and backward, the instants at which the module runs that stands for others, as ranges."""
    found: dict[Any, list[tuple[int, int]]] = {}
    for n, instant in enumerate(instants):
        if instant.phase != "start" and repeats.holds(instant.module):
            ranges = found.setdefault(instant.run, [])
            if ranges and ranges[-1][1] == n:
                ranges[-1] = (ranges[-1][0], n + 1)
            else:
                ranges.append((n, n + 1))
    return found


def _ranges_of_others(
    block: Block, end: int, category: str, inside: Mapping[Any, list[tuple[int, int]]], instants: Sequence[Instant]
) -> list[tuple[int, int]]:
    """The instants at which each of the modules that were left out has what a block is of the one that ran.

    Their forwards come after its own, and their backwards before. While it runs, nothing of the same forward and backward is
    in the others, but what they keep: gradients, and units that stay gathered until a backward reduces.

    Args:
        block: of the module that ran; ``end``: where it is freed.
        category: of the block.
        inside: see :func:`_ranges_inside`.
    """
    begin = block.begin
    own = inside.get(instants[begin].run, [])
    if category in ("parameters", "optimizer") or (category == "gradients" and block.end is None):
        return [(begin, end)]  # buckets are made for all at once, and stay
    if category == "gradients":
        return [(min([begin, *_backwards(own, instants)]), end)]
    if category == "unsharded":
        forwards = [b for a, b in own if instants[a].phase in _FORWARD]
        last = inside.get(instants[end].run, []) if end < len(instants) else []
        begin, end = max([begin, *forwards]), min([end, *_backwards(last, instants)])
        return [(begin, end)] if begin < end else []
    found = []
    for a, b in own:
        if a < end and b > begin:
            found.append((begin, max(a, begin)))
            begin = min(b, end)
    return [*found, (begin, end)]


def _backwards(ranges: Sequence[tuple[int, int]], instants: Sequence[Instant]) -> list[int]:
    """Where those of the ranges begin that are in a backward."""
    return [a for a, _ in ranges if instants[a].phase not in _FORWARD]


def _is_there_at_any(block: Block, instants: Sequence[int]) -> bool:
    """``instants`` are in ascending order."""
    next_one = bisect.bisect_left(instants, block.begin)
    return next_one < len(instants) and _is_there(block, instants[next_one])


def _is_there(block: Block, instant: int) -> bool:
    return block.begin <= instant and (block.end is None or block.end > instant)
