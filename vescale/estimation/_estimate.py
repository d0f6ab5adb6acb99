"""``estimate``: memory of every rank, and seconds, of a training step, before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from vescale.errors import EstimateArgumentError, EstimateError
from vescale.estimation._compare import Comparison, compare
from vescale.estimation._depth import Repeats, first_and_last_of, repeats_of
from vescale.estimation._devices import Device, device_of
from vescale.estimation._memory_timeline import MemoryTimeline, label_of, timeline_of
from vescale.estimation._optimizers import make_optimizer
from vescale.estimation._rank_states import RankStates, rank_states
from vescale.estimation._rehearsal import Rehearsal, rehearse
from vescale.estimation._skeleton import loss_of, make_batch, skeleton_of
from vescale.estimation._step_time import StepTime, step_time
from vescale.estimation._unknown_values import Routing
from vescale.ir import Local, Program, Wrap, lower
from vescale.placements import shard_dim
from vescale.plans import Plan

__all__ = ["Estimate", "RankMemory", "estimate", "routing_of"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class RankMemory:
    """Memory of ranks that need the same, in bytes.

    Attributes:
        ranks: these ranks; ``coordinates``: of the first of them, by axis.
        peak_bytes: the most at one instant of a step in steady state; ``peak_at``: that instant.
        first_step_bytes: the peak of the first step.
        categories: what there is at the peak; ``activations`` by module. ``maximum``: of each category at any instant.
        timeline: the step as moments: ``at``, ``bytes`` and categories.
        saved_bytes: of activations when the forward ends.
    """

    ranks: tuple[int, ...]
    coordinates: dict[str, int]
    peak_bytes: int
    peak_at: str
    first_step_bytes: int
    categories: dict[str, Any]
    maximum: dict[str, int]
    timeline: tuple[dict[str, Any], ...]
    saved_bytes: int


@dataclass
class Estimate:
    """What a plan needs; see :func:`estimate`.

    Attributes:
        program: the lowered program that was looked at.
        device: what it would run on.
        ranks: memory, one entry for ranks that need the same.
        outside: bytes that the device needs beside PyTorch's allocator, by what they are for.
        time: seconds of a step.
        notes: what was assumed.
        given: the arguments of :func:`estimate`.
        zero_table, what_if: rows of :mod:`vescale.estimation._variants`, where they were asked for.
    """

    program: Program
    device: Device
    ranks: tuple[RankMemory, ...]
    outside: dict[str, int]
    time: StepTime
    notes: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict, repr=False)
    zero_table: tuple[dict[str, Any], ...] = ()
    what_if: tuple[dict[str, Any], ...] = ()

    def again(self, **changes: Any) -> Estimate:
        """The estimate of the same arguments but for those in ``changes``."""
        return estimate(**{**self.given, **changes})

    @property
    def peak(self) -> RankMemory:
        """The ranks that need most."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return max(self.peak.peak_bytes, self.peak.first_step_bytes)

    @property
    def peak_rank(self) -> int:
        return self.peak.ranks[0]

    @property
    def needed_bytes(self) -> int:
        """With what is outside of PyTorch."""
        return self.peak_bytes + sum(self.outside.values())

    @property
    def step_seconds(self) -> float:
        return self.time.seconds

    @property
    def fits(self) -> bool:
        return self.device.memory_bytes is None or self.needed_bytes <= self.device.memory_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain data: numbers of bytes and seconds, names and lists."""
        return {
            "mesh": dict(zip(self.program.axes.names, self.program.axes.sizes)),
            "device": self.device.name,
            "memory_bytes": self.device.memory_bytes,
            "fits": self.fits,
            "peak_rank": self.peak_rank,
            "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "outside": self.outside,
            "ranks": [
                {
                    "rank": rank.ranks[0],
                    "ranks": list(rank.ranks),
                    "coordinates": rank.coordinates,
                    "peak_bytes": rank.peak_bytes,
                    "peak_at": rank.peak_at,
                    "first_step_bytes": rank.first_step_bytes,
                    "categories": rank.categories,
                    "maximum": rank.maximum,
                    "outside": self.outside,
                    "timeline": list(rank.timeline),
                }
                for rank in self.ranks
            ],
            "step_seconds": self.time.seconds,
            "terms": self.time.terms(),
            "notes": list(self.notes),
            "zero_table": list(self.zero_table),
            "what_if": list(self.what_if),
        }

    def compare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Comparison:
        """The estimate beside what a run of this process has measured; see :func:`vescale.debug.compare_estimate`.

        Args:
            model: what ran.
            optimizer: whose states are counted. None: none are.
        """
        return compare(model, self, optimizer)


def estimate(
    model: nn.Module,
    plan: Plan,
    *,
    batch: Mapping[str, Any],
    optimizer: str | MakeOptimizer | None = "adamw",
    device: str | Device = "cpu",
    steps: int = 3,
    loss: Callable[[Any, Mapping[str, Any]], torch.Tensor] | None = None,
    load: float | list[float] = 1.0,
    rank: int = 0,
    reduce_depth: bool = True,
) -> Estimate:
    """Memory of every rank and seconds of a step, by running the engine's own code for one rank without numbers.

    No ranks, and no devices, are needed, and nothing of the process changes: ``model`` is copied without its memory.
    Lists of equal modules are run with the first and the last of them only.

    Args:
        model: on the meta device, deferred or real; not parallelized.
        plan: what :func:`vescale.parallelize` would get.
        batch: by name of the forward's inputs, tensors of global shape (on the meta device without values), shapes,
            or other arguments.
        optimizer: a name (``adamw``, ``adam``, ``sgd``, ``adamw8bit``, ...), a function of the parameters, or None.
        device: a name of a table (``h100-80g``, ``cpu``, ...), or a table.
        steps: how many steps are run; the last one is the steady state.
        loss: of the model's output and the batch; by default ``output.loss``, or the mean of the first output.
        load: of experts: how many times the mean this rank's experts get, or relative numbers of tokens of all experts.
        rank: whose activations are measured. Parameters, gradients and optimizer states are those of every rank.
        reduce_depth: False runs every module.

    Raises:
        PlanError: everything that ``lower`` finds; a model that has been parallelized.
        TypeError, ValueError: a batch that does not fit, an unknown optimizer or device.
    """
    if steps < 1:
        raise EstimateArgumentError(f"steps is {steps}; give at least 1 (3 shows the steady state)")
    if plan.pipeline_entry is not None:
        raise EstimateError(
            "estimate does not run stages of a pipeline yet; estimate the plan of one stage, without its pipeline entry",
            plan.pipeline_entry.source,
        )
    table = device_of(device)
    maker = make_optimizer(optimizer)
    inputs = make_batch(model, batch)
    skeleton = skeleton_of(model)
    if plan.mesh is not None:
        plan = plan.without_mesh()
    program = lower(plan, skeleton)
    states = rank_states(program, skeleton)
    uneven = _uneven_axes(program, inputs)
    notes = []

    def run(repeats: tuple[Repeats, ...], rank: int = rank) -> Rehearsal:
        copy = first_and_last_of(skeleton, repeats)
        routing = routing_of(program, load, rank)
        return rehearse(
            copy, plan, program.axes, rank, inputs, maker, loss or loss_of, num_steps=steps, routing=routing
        )

    repeats = repeats_of(skeleton) if reduce_depth else ()
    try:
        rehearsal = run(repeats)
    except Exception:
        if not repeats:
            raise
        repeats = ()  # the model's forward, or the plan, names modules by number
        rehearsal = run(repeats)
    if repeats:
        notes.append(
            "equal modules were run as the first and the last of "
            + ", ".join(f"{len(r.names)} in {r.path}" for r in repeats)
        )
    seen = [_Seen(rank, rehearsal, timeline_of(rehearsal, repeats, table.rounding_bytes))]
    if uneven:  # the last ranks have fewer rows
        coordinate = np.unravel_index(rank, program.axes.sizes)
        last = [
            size - 1 if a in uneven else int(c)
            for a, size, c in zip(program.axes.names, program.axes.sizes, coordinate)
        ]
        other = int(np.ravel_multi_index(last, program.axes.sizes))
        if other != rank:
            again_ = run(repeats, other)
            seen.append(_Seen(other, again_, timeline_of(again_, repeats, table.rounding_bytes)))
    ran = " and ".join(str(one.rank) for one in seen)
    notes.insert(0, f"rank {ran} was run for {steps} steps without numbers, with the engine's own code")
    ranks = _ranks(program, seen, uneven, repeats, states)
    outside = table.outside(program.axes)
    time = step_time(rehearsal, repeats, table, program.axes, skeleton, inputs)

    given = {
        "model": model,
        "plan": plan,
        "batch": batch,
        "optimizer": optimizer,
        "device": table,
        "steps": steps,
        "loss": loss,
        "load": load,
        "rank": rank,
        "reduce_depth": reduce_depth,
    }
    return Estimate(program, table, ranks, outside, time, tuple(notes), given)


def routing_of(program: Program, load: float | list[float], rank: int) -> Routing:
    """How tokens choose among the experts of a rank; ``load`` as in :func:`estimate`."""
    sizes = dict(zip(program.axes.names, program.axes.sizes))
    experts = next((i.op.experts for i in program if isinstance(i.op, Local) and i.op.kind == "experts"), ())
    coordinate = np.unravel_index(rank, program.axes.sizes)
    index, count = 0, 1
    for axis, own in zip(program.axes.names, coordinate):
        if axis in experts:
            index, count = index * sizes[axis] + int(own), count * sizes[axis]
    if isinstance(load, int | float):
        return Routing(factor=float(load), share=(index, count))
    return Routing(histogram=tuple(load), share=(index, count))


@dataclass(frozen=True)
class _Seen:
    """A rank that was run."""

    rank: int
    rehearsal: Rehearsal
    timeline: MemoryTimeline


def _uneven_axes(program: Program, batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Axes whose ranks do not get equal parts of the batch."""
    found: dict[str, None] = {}
    for i in program:
        if i.path == "" and isinstance(i.op, Wrap):
            given = [batch.get(str(i.index))] if i.index is not None else list(batch.values())
            for axis, placement in zip(program.axes.names, i.op.placements):
                dim = shard_dim(placement) if placement is not None else None
                sizes = [
                    x.shape[dim] for x in given if dim is not None and isinstance(x, torch.Tensor) and x.ndim > dim
                ]
                if any(size % program.axes.size(axis) for size in sizes):
                    found[axis] = None
    return tuple(found)


def _ranks(
    program: Program, seen: list[_Seen], uneven: tuple[str, ...], repeats: tuple[Repeats, ...], states: RankStates
) -> tuple[RankMemory, ...]:
    """The ranks that were run, and the others with their own parameters, gradients and optimizer states."""
    sizes = program.axes.sizes
    chosen = np.zeros(sizes, dtype=np.int64)
    if len(seen) > 1:
        chosen[tuple(size - 1 if axis in uneven else slice(None) for axis, size in zip(program.axes.names, sizes))] = 1
    names = ("parameters", "gradients", "optimizer")
    changes = []
    for one in seen:
        own = tuple(map(int, np.unravel_index(one.rank, sizes)))
        optimizer = _optimizer_bytes(one.rehearsal, repeats, states, own)
        changes.append(np.stack([a - a[own] for a in (states.parameters, states.gradients, optimizer)], axis=-1))
    change = changes[0] if len(seen) == 1 else np.where(chosen[..., None] == 1, changes[1], changes[0])
    stacked = np.concatenate([change, chosen[..., None]], axis=-1).reshape(-1, len(names) + 1)
    rows, first, inverse = np.unique(stacked, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    groups = np.split(order, np.cumsum(np.bincount(inverse.reshape(-1)))[:-1])
    found = []
    for row in sorted(range(len(rows)), key=lambda n: first[n]):
        one = seen[int(rows[row][-1])]
        last = one.rehearsal.num_steps - 1
        own_change = {name: int(value) for name, value in zip(names, rows[row])}
        ranks = tuple(map(int, groups[row]))
        found.append(_rank_memory(program, ranks, one.timeline, one.timeline.peak_of(last), last, own_change))
    return tuple(found)


def _rank_memory(
    program: Program,
    ranks: tuple[int, ...],
    timeline: MemoryTimeline,
    peak: int,
    step: int,
    change: dict[str, int],
) -> RankMemory:
    def changed(categories: dict[str, int]) -> dict[str, int]:
        """Gradients that are not there do not change."""
        return {
            name: max(0, size + change.get(name, 0)) if size or name != "gradients" else 0
            for name, size in categories.items()
        }

    categories: dict[str, Any] = changed(timeline.at(peak))
    total = sum(categories.values())
    moments = tuple(
        {"at": m.at, "bytes": sum(changed(m.categories).values()), **changed(m.categories)}
        for m in timeline.moments(step)
    )
    first = sum(changed(timeline.at(timeline.peak_of(0))).values())
    categories["activations"] = timeline.activations(peak)
    coordinates = {name: int(c) for name, c in zip(program.axes.names, np.unravel_index(ranks[0], program.axes.sizes))}
    at = label_of(timeline.instants[peak])
    saved = timeline.at(timeline.end_of_forward(step))["activations"]
    return RankMemory(ranks, coordinates, total, at, first, categories, changed(timeline.largest(step)), moments, saved)


def _optimizer_bytes(
    rehearsal: Rehearsal, repeats: tuple[Repeats, ...], states: RankStates, own: tuple[int, ...]
) -> np.ndarray:
    """Of every rank: states that have as many elements as their parameter grow with it, others are alike."""
    growing = fixed = 0
    for state in rehearsal.states:
        times = next((r.count for r in repeats if r.holds(state.module)), 1)
        if state.numel == state.parameter_numel:
            growing += state.num_bytes * times
        else:
            fixed += state.num_bytes * times
    elements = states.elements
    if not elements[own]:
        return np.full_like(elements, fixed + growing)
    return np.asarray(elements * growing // elements[own] + fixed, dtype=np.int64)
