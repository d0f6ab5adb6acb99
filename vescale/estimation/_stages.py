"""Stages of a pipeline: how a rank of one stage runs without the others, and how long a step of all stages takes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vescale.plans import MeshAxes, Path, Plan, with_pipeline

if TYPE_CHECKING:
    from vescale.pipeline import Schedule

Headers = dict[int, Sequence[Any]]


def plan_of_cut(plan: Plan, splits: Sequence[str]) -> Plan:
    """``plan`` with the modules before which stages begin by name, so that a model with fewer modules is cut alike."""
    entry = plan.pipeline_entry
    assert entry is not None
    paths = entry.split_before if entry.stages else tuple(Path.parse(re.escape(path)) for path in splits)
    return _with_entry(plan, plan.axes, _explicit(entry, paths))


def one_rank_plan(plan: Plan, num_stages: int) -> Plan:
    """``plan`` with all stages on one rank, for one micro-batch: what enters each stage is seen there."""
    entry = plan.pipeline_entry
    assert entry is not None
    order = [f"{stage}F0" for stage in range(num_stages)] + [f"{stage}B0" for stage in reversed(range(num_stages))]
    axes = MeshAxes(
        plan.axes.names, tuple(1 if n == entry.mesh else s for n, s in zip(plan.axes.names, plan.axes.sizes))
    )
    return _with_entry(plan, axes, replace(entry, microbatches=1, schedule=",".join(order)))


def _explicit(entry: Any, paths: tuple[Path, ...]) -> Any:
    # Rows are tried with other ranks, which there are none of here.
    return replace(entry, split_before=paths, balance=None, stages_per_rank=None, memory_gib=None, rows="microbatch")


def _with_entry(plan: Plan, axes: MeshAxes, pipeline: Any) -> Plan:
    found = Plan(axes)
    for entry in plan.entries:
        found.add(entry)
    return with_pipeline(found, pipeline)


def first_microbatch(batch: Mapping[str, Any], microbatches: int) -> dict[str, Any]:
    """The rows of the first of so many micro-batches."""
    rows = max((x.shape[0] for x in batch.values() if isinstance(x, torch.Tensor) and x.ndim), default=0)

    def part(x: Any) -> Any:
        cut = isinstance(x, torch.Tensor) and x.ndim and x.shape[0] == rows and rows % microbatches == 0
        return x[: rows // microbatches].clone() if cut else x

    return {name: part(value) for name, value in batch.items()}


def follow_stages(model: nn.Module, place: Any, headers: Headers) -> None:
    """Tell ``place`` which stage and micro-batch run. ``headers`` has what enters stages, or learns it."""
    runner: Any = model.__dict__["_pipeline_runner"]
    forward, around_backward = runner.forward, runner.around_backward

    @contextlib.contextmanager
    def during(phase: str, stage: int, microbatch: int) -> Iterator[None]:
        place.phase, place.stage, place.microbatch = phase, stage, microbatch
        try:
            yield
        finally:
            place.phase, place.stage, place.microbatch = "communication", None, None

    def run_forward(stage: int, microbatch: int, received: Any) -> Any:
        with during("forward", stage, microbatch):
            return forward(stage, microbatch, received)

    @contextlib.contextmanager
    def run_backward(stage: int, microbatch: int, kind: str) -> Iterator[Any]:
        phase = "weights" if kind == "W" else "backward"
        with during(phase, stage, microbatch), around_backward(stage, microbatch, kind) as backward:
            yield backward

    runner.forward, runner.around_backward = run_forward, run_backward
    from vescale.compat.pipelining import agree_on_sizes

    for stage in runner.stages:
        agree_on_sizes(stage)
    runner.header, runner.header_of_arrived = headers.__getitem__, lambda stage, _: headers[stage]
    runner.tell_header = lambda stage, found, **_: headers.setdefault(stage, tuple(found))
    runner.flags_of = lambda _: []
    runner.returned = lambda stage: [header.requires_grad for header in headers[stage]]


def step_of_stages(schedule: Schedule, seconds: Callable[[int, str], float], message: float = 0.0) -> float:
    """Seconds from the first forward to the last backward.

    Args:
        seconds: of a stage's forward (``F``), backward (``B``), or the halves of one that is split (``I``, ``W``).
        message: seconds that a message takes between stages on different ranks.
    """
    ends: dict[tuple[int, str, int], float] = {}
    positions, clocks = [0] * len(schedule.actions), [0.0] * len(schedule.actions)
    last, moved = schedule.num_stages - 1, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while positions[rank] < len(actions):
                stage, kind, mb = actions[positions[rank]]
                needs = [(stage - 1, "F", mb)] if kind == "F" and stage else []
                if kind in "BI":
                    needs = [(stage, "F", mb), *([(stage + 1, "I", mb)] if stage < last else [])]
                if any(need not in ends for need in needs):
                    break
                arrive = (ends[n] + (message if schedule.rank_of[n[0]] != rank else 0.0) for n in needs)
                clocks[rank] = max([clocks[rank], *arrive]) + seconds(stage, kind)
                ends[stage, "I" if kind == "B" else kind, mb] = clocks[rank]
                positions[rank] += 1
                moved = True
    return max(clocks)
