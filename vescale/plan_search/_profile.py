"""One rank's step of a model with the first and the last of equal blocks, run by the estimator without numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.comm import CommRecord
from vescale.compat import local_of, tree_leaves
from vescale.estimation import (
    Block,
    Device,
    MemoryTimeline,
    OpSeconds,
    Rehearsal,
    Repeats,
    attention_of_gpu,
    bucket_shares,
    is_of_parameters,
    loss_of,
    make_batch,
    names_block,
    rehearse,
    routing_of,
    skeleton_of,
    timeline_of,
)
from vescale.ir import lower
from vescale.plans import Plan

# ``Arrays``: bytes at the instants of a step, from the memory of a rank that has run one.


BACKWARD = ("backward", "recompute")


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters ZeRO gathers together, without ZeRO.

    Attributes:
        num_bytes: of parameters; ``trained``: of these, of those that are trained.
        times: how many equal units there are.
        runs_backward: whether a gradient reaches it.
    """

    num_bytes: int
    trained: float
    times: int
    runs_backward: bool


@dataclass(frozen=True)
class Arrays:
    """Bytes at the instants of a forward and backward, with a number of blocks.

    Attributes:
        other: all but parameters, gradients, optimizer states and ``casts``.
        casts: copies of parameters in another dtype. With ZeRO they are gathered in this dtype.
        gradients: whole ones; ``of_unit``: of these, those that the unit whose backward runs has made so far.
        running: parameters of the unit that runs, and after the backwards of all units of the last one of them.
        waiting: parameters of units whose backwards are not over, and of the last one of them.
        reduced: trained parameters of units whose backwards are over.
        in_backward, in_blocks: where each instant is.
        parameters: at rest, without ZeRO; ``largest``: of one of them; ``outer_parameters``: of those of no unit;
            ``late_parameters``: of these, those that the forward uses after the blocks.
        units: all of them; ``outer_share``: which part of the parameters of no unit is trained.
        saved: activations when the forward ends; ``early``: of these, those from before the blocks, which every stage of a
            pipeline computes.
    """

    other: np.ndarray
    casts: np.ndarray
    gradients: np.ndarray
    of_unit: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    reduced: np.ndarray
    in_backward: np.ndarray
    in_blocks: np.ndarray
    parameters: int
    largest: int
    outer_parameters: int
    late_parameters: int
    saved: int
    early: int
    units: tuple[Unit, ...] = ()
    outer_share: float = 1.0

    @property
    def trained(self) -> int:
        """Bytes of all gradients."""
        return int(self.gradients.max(initial=0))


def extended(two: Arrays, three: Arrays, num_blocks: int) -> Arrays:
    """The arrays of ``num_blocks`` blocks from those of two and of three."""

    def of(first: Any, second: Any) -> Any:
        return first + (num_blocks - 2) * (second - first)

    fixed = ("in_backward", "in_blocks", "units", "outer_share", "largest")
    grown = [one.name for one in fields(Arrays) if one.name not in fixed]
    units = tuple(replace(b, times=of(a.times, b.times)) for a, b in zip(two.units, three.units))
    return replace(three, units=units, **{name: of(getattr(two, name), getattr(three, name)) for name in grown})


def later_gradients(timeline: MemoryTimeline) -> np.ndarray:
    """Bytes of a later step: buckets, which the first backward ends with, stay from step to step."""
    found = timeline.categories["gradients"]
    begins = [one.block.begin for one in timeline.blocks if one.category == "gradients" and one.block.end is None]
    is_before = np.arange(len(found)) < min(begins, default=len(found))
    return found - timeline.waiting + np.where(is_before, found[-1], 0)


def _bytes_of(blocks: Iterable[Block], num_instants: int) -> np.ndarray:
    changes = np.zeros(num_instants + 1, dtype=np.int64)
    for one in blocks:
        changes[one.begin] += one.num_bytes
        changes[one.end if one.end is not None else num_instants] -= one.num_bytes
    return np.asarray(np.cumsum(changes)[:-1])


def gradients_of_unit(timeline: MemoryTimeline, unit_at: list[str]) -> np.ndarray:
    """Bytes of the gradients that a unit's backward has made so far, while it runs."""
    apart = [one.block for one in timeline.blocks if one.category == "gradients" and one.block.end is not None]
    made = _bytes_of(apart, len(timeline.instants))
    found = np.zeros_like(made)
    before, current = 0, ""
    for n, instant in enumerate(timeline.instants):
        if unit_at[n] and instant.phase in BACKWARD:
            if unit_at[n] != current:
                before, current = int(made[n - 1]), unit_at[n]
            found[n] = made[n] - before
    return found


@dataclass
class Profile:
    """What was seen of one rank, without ZeRO and stages.

    Attributes:
        rehearsal: the run; ``repeats``: the blocks that were left out.
        rows: of this rank; ``data_ranks``: along ``dp``.
        rounding: blocks of the allocator are multiples of this number of bytes.
        message_bytes: of what the last block is given, as parts of this rank.
        num_tensors: parameters that the optimizer gets.
        late: paths of the modules with parameters that the forward uses after the blocks.
        trained_shares: which part of a unit's parameters is trained, by path of its module; of no unit by "".
    """

    rehearsal: Rehearsal
    repeats: tuple[Repeats, ...]
    rows: int
    data_ranks: int
    rounding: int
    message_bytes: int
    num_tensors: int
    late: frozenset[str]
    trained_shares: Mapping[str, float] = field(default_factory=dict)
    ops: dict[tuple[int, str, str], OpSeconds] = field(default_factory=dict, repr=False)
    """Computed before."""
    _units_of_modules: dict[str | None, str] = field(default_factory=dict, repr=False)
    _arrays: dict[int, Arrays] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        return max((len(one.names) for one in self.repeats), default=0)

    def is_of_blocks(self, module: str | None) -> bool:
        return module is not None and any(module.startswith(f"{one.path}.") for one in self.repeats)

    def part_of(self, module: str | None) -> str:
        """``blocks``, or ``late`` or ``early``: what the last stage or the first one has beside them."""
        if self.is_of_blocks(module):
            return "blocks"
        is_late = not module or any(module == path or module.startswith(f"{path}.") for path in self.late)
        return "late" if is_late else "early"

    def times_of(self, record: CommRecord) -> float:
        """How often a collective happens; of a bucket of gradients, how many times as much as what was run it moves."""
        if record.requester.startswith("bucket"):
            return self._shares.get(record.requester, 1.0)
        return next((one.count for one in self.repeats if names_block(record.requester, one)), 1)

    def repeats_with(self, num_blocks: int) -> tuple[Repeats, ...]:
        """The lists of blocks, the longest one with ``num_blocks`` of its blocks."""
        return tuple(
            replace(one, names=one.names[: num_blocks - 1] + one.names[-1:])
            if len(one.names) == self.num_blocks
            else one
            for one in self.repeats
        )

    def arrays(self, num_blocks: int) -> Arrays:
        """With so many blocks. Bytes grow by the same for each block beyond two."""
        if num_blocks not in self._arrays:
            if num_blocks <= 3 or self.num_blocks < 3:
                self._arrays[num_blocks] = self._arrays_of(self.repeats_with(num_blocks))
            else:
                self._arrays[num_blocks] = extended(self.arrays(2), self.arrays(3), num_blocks)
        return self._arrays[num_blocks]

    def _arrays_of(self, repeats: tuple[Repeats, ...]) -> Arrays:
        timeline = timeline_of(self._with_casts, repeats, self.rounding)
        own = np.array([n for n, i in enumerate(timeline.instants) if i.phase != "start"])
        end = timeline.end_of_forward(0)
        casts = timeline.categories["unsharded"]
        rest = casts + sum(timeline.categories[name] for name in ("parameters", "gradients", "optimizer"))
        unit_at = [self._unit_of(i.module) for i in timeline.instants]
        units, running, waiting, reduced = self._units(timeline, repeats, unit_at)
        parameters = [one for one in timeline.blocks if one.category == "parameters"]
        outer = [one for one in parameters if not self._unit_of(one.module)]
        places = [timeline.instants[n] for n in own]
        return Arrays(
            other=(timeline.total - rest)[own],
            casts=casts[own],
            gradients=later_gradients(timeline)[own],
            of_unit=gradients_of_unit(timeline, unit_at)[own],
            running=running[own],
            waiting=waiting[own],
            reduced=reduced[own],
            in_backward=np.array([i.phase in (*BACKWARD, "optimizer") for i in places], dtype=bool),
            in_blocks=np.array([self.is_of_blocks(i.module) for i in places], dtype=bool),
            parameters=int(timeline.categories["parameters"][own[-1]]),
            largest=max((one.block.num_bytes for one in parameters), default=0),
            outer_parameters=sum(one.block.num_bytes for one in outer),
            late_parameters=sum(one.block.num_bytes for one in outer if one.module in self.late),
            saved=int(timeline.categories["activations"][end]),
            early=self._early(timeline, end),
            units=units,
            outer_share=self.trained_shares.get("", 1.0),
        )

    @functools.cached_property
    def _with_casts(self) -> Rehearsal:
        """With copies of parameters in the category of what units gather, which nothing else is in."""
        log, kinds = self.rehearsal.log, dict(self.rehearsal.kinds)
        for one in log.blocks:
            source = self.rehearsal.copies.get(one.storage)
            if source is not None and one.storage not in kinds and kinds.get(source, ("",))[0] == "parameters":
                kinds[one.storage] = "unsharded", log.instants[one.begin].module
        return replace(self.rehearsal, kinds=kinds)

    def _unit_of(self, module: str | None) -> str:
        """The path of the unit that a module is in; "" for none."""
        if module not in self._units_of_modules:
            parts = (module or "").split(".")
            paths = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
            self._units_of_modules[module] = next((path for path in paths if path in self.trained_shares), "")
        return self._units_of_modules[module]

    def _units(
        self, timeline: MemoryTimeline, repeats: tuple[Repeats, ...], unit_at: list[str]
    ) -> tuple[tuple[Unit, ...], np.ndarray, np.ndarray, np.ndarray]:
        """The units, and ``running``, ``waiting`` and ``reduced`` of :class:`Arrays`. Backwards of units that were left out
        come before that of the one that stands for them."""
        number = len(timeline.instants)
        at = np.arange(number)
        where = np.array(unit_at)
        is_backward = np.array([i.phase in BACKWARD for i in timeline.instants], dtype=bool)
        sizes: dict[str, int] = {path: 0 for path in self.trained_shares if path}
        for one in timeline.blocks:
            if one.category == "parameters" and self._unit_of(one.module):
                sizes[self._unit_of(one.module)] += one.block.num_bytes
        backwards = {path: np.flatnonzero(is_backward & (where == path)) for path in sizes}
        last = max(sizes, key=lambda path: backwards[path].max(initial=-1), default="")
        running, waiting, reduced = (np.zeros(number) for _ in range(3))
        units = []
        for path, size in sizes.items():
            times = next((r.count for r in repeats if r.holds(path)), 1)
            own = backwards[path]
            begin, end = (own[0], own[-1] + 1) if len(own) else (number, number)
            trained = size * self.trained_shares[path]
            units.append(Unit(size, trained, times, len(own) > 0))
            running += size * ((where == path) | ((path == last) & (at >= end)))
            waiting += size * ((at < end) | (path == last)) + size * (times - 1) * (at < begin)
            reduced += trained * (at >= end) + trained * (times - 1) * (at >= begin)
        return tuple(units), running, waiting, reduced

    def _early(self, timeline: MemoryTimeline, end: int) -> int:
        """Activations that are there at the instant ``end`` and were before the first block ran."""
        inside = (n for n, i in enumerate(timeline.instants[:end]) if self.is_of_blocks(i.module))
        first = next(inside, 0)
        return sum(
            one.block.num_bytes
            for one in timeline.blocks
            if one.category == "activations"
            and one.block.begin < first
            and (one.block.end is None or one.block.end > end)
        )

    @functools.cached_property
    def _shares(self) -> dict[str, float]:
        return bucket_shares(self.rehearsal.in_buckets, self.repeats)

    @functools.cached_property
    def inner_records(self) -> list[CommRecord]:
        """Collectives of activations."""
        return [r for r in self.rehearsal.collectives if not is_of_parameters(r.requester)]

    @functools.cached_property
    def gradient_records(self) -> list[CommRecord]:
        """Those that reduce gradients of parameters, and others that compute hides."""
        return [r for r in self.rehearsal.collectives if is_of_parameters(r.requester)]


def _late_modules(model: nn.Module, units: Collection[str]) -> frozenset[str]:
    """Those after the last of ``units``, by the order of the model's modules. A parameter with several names belongs to all
    of their modules."""
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    after = max((order[one] for one in units), default=-1)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(own for paths in names.values() if any(order[p] > after for p in paths) for own in paths)


def _trained_shares(model: nn.Module, units: Collection[str]) -> dict[str, float]:
    """Which part of the elements is trained, by path of the modules that ``units`` are expressions for, and of the rest by
    ""."""
    paths = [path for path, _ in model.named_modules() if any(re.fullmatch(one, path) for one in units if one)]
    elements: dict[tuple[str, bool], int] = {}
    for name, parameter in model.named_parameters():
        path = next((one for one in paths if name.startswith(f"{one}.")), "")
        elements[path, parameter.requires_grad] = elements.get((path, parameter.requires_grad), 0) + parameter.numel()
    return {
        path: elements.get((path, True), 0) / max(elements.get((path, True), 0) + elements.get((path, False), 0), 1)
        for path in dict.fromkeys(["", *(path for path, _ in elements)])
    }


def profile_of(
    reduced: nn.Module,
    plan: Plan,
    batch: Mapping[str, Any],
    rows: int,
    repeats: tuple[Repeats, ...],
    units: Collection[str],
    *,
    device: Device,
    load: Any = 1.0,
    loss: Any = None,
) -> Profile:
    """Run rank 0 without numbers. Raises what the model or the plan raises.

    Args:
        reduced: on the meta device, with the first and the last of the blocks in ``repeats``.
        plan: without ZeRO and pipeline.
        batch: global, of as many rows as the plan's ranks take with ``rows`` each.
        units: expressions for the modules that ZeRO gathers together.
    """
    program = lower(plan, reduced)
    model = skeleton_of(reduced)
    seen: list[int] = []

    def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        sizes = [local_of(x) if isinstance(x, DTensor) else x for x in given]
        seen.append(sum(x.numel() * x.element_size() for x in sizes))

    hooks = [
        model.get_submodule(f"{one.path}.{one.names[-1]}").register_forward_pre_hook(note, with_kwargs=True)
        for one in repeats
    ]
    inputs = make_batch(model, batch, with_labels=loss is None)
    num_tensors = len({id(p) for p in model.parameters() if p.requires_grad})
    per_block = [
        sum(p.requires_grad for p in model.get_submodule(r.stand_in).parameters()) * (r.count - 1) for r in repeats
    ]
    shares = _trained_shares(model, units)
    late = _late_modules(model, shares)
    rehearsal = rehearse(
        model,
        plan,
        program.axes,
        0,
        inputs,
        None,
        loss or loss_of,
        num_steps=1,
        routing=routing_of(program, load, 0),
        attention=attention_of_gpu() if device.is_gpu else None,
    )
    for hook in hooks:
        hook.remove()
    return Profile(
        rehearsal,
        repeats,
        rows,
        plan.axes.size("dp") if "dp" in plan.axes else 1,
        device.rounding_bytes,
        seen[0] if seen else 0,
        num_tensors + sum(per_block),
        late,
        shares,
    )
