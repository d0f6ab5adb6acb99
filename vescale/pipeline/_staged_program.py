"""``StagedProgram``: what a program's pipeline is and does, before any process runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale.ir import (
    Finding,
    Local,
    Program,
    Unit,
    UnitBucket,
    check,
    lower,
    predict,
    predict_buckets,
    skeleton_of,
    stand_in_for_experts,
    unit_buckets,
)
from vescale.pipeline._batches import inputs_of, microbatches_of
from vescale.pipeline._cut import Cut
from vescale.pipeline._gates import add_gates
from vescale.pipeline._guessed_check import check_with_guesses
from vescale.pipeline._loss_path import check_loss
from vescale.pipeline._residency import releases
from vescale.pipeline._schedule import Schedule, make_schedule
from vescale.pipeline._stage_program import program_of_stages, refuse_torn
from vescale.pipeline._trace import trace
from vescale.pipeline._traced import Trace
from vescale.pipeline._traced_dtypes import TracedDtypes
from vescale.plans import PipelineEntry, Plan, PlanError

__all__ = ["StagedProgram", "check_stages", "stages_of_unit"]


@dataclass(frozen=True)
class StagedProgram:
    """A plan with a pipeline, and a model, as stages.

    Attributes:
        entry: the plan's.
        cut: the modules and parameters of each stage.
        schedule: what each rank along the pipeline's axis computes, in order.
        program: the instructions of all stages, on the mesh of one.
        skeleton: the model with parameters on the meta device.
        problem: why no step can find its loss; None where it may.
    """

    entry: PipelineEntry
    cut: Cut
    schedule: Schedule
    program: Program
    skeleton: nn.Module
    problem: PlanError | None = None

    @classmethod
    def of(cls, plan: Plan, model: nn.Module, program: Program | None = None) -> StagedProgram:
        """Cut a model into the stages of a plan's pipeline.

        Args:
            program: ``lower(plan, model)``; None: lowered here.

        Raises PlanError for a pipeline that does not fit the model, the mesh or the program, also in a forward of guessed
        inputs, if there are any that the model takes.
        """
        entry = plan.pipeline_entry
        assert entry is not None
        program = lower(plan, model) if program is None else program
        num_ranks = plan.axes.size(entry.mesh)
        cut = Cut.of(model, entry, num_ranks, program)
        schedule = make_schedule(entry, num_ranks, cut.num_stages)
        refuse_torn(program, cut)
        skeleton = skeleton_of(model)
        for instruction in program:
            if isinstance(instruction.op, Local) and instruction.op.kind == "experts":
                stand_in_for_experts(skeleton.get_submodule(instruction.path))
        skeleton.__dict__["_pipeline_dtypes"] = TracedDtypes(skeleton, program)
        add_gates(skeleton, cut)
        problem = check_with_guesses(model, skeleton, cut, entry)
        return cls(entry, cut, schedule, program, skeleton, problem)

    def traced(self, batch: Mapping[str, Any]) -> Trace:
        """The forward of the first micro-batch of ``batch``. Raises PlanError for one that the stages do not fit."""
        part = self._inputs(batch)
        found = trace(self.skeleton, self.cut, part, self.entry.source, grad=True)
        check_loss(found.output, self.entry)
        return found

    def _inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Of the first micro-batch."""
        return inputs_of(self.skeleton, microbatches_of(batch, self.entry)[0], self.entry)

    def counts(self, batch: Mapping[str, Any]) -> dict[int, dict[str, int]]:
        """What one ``.step(**batch)`` communicates, for each stage, on each of its ranks.

        ``sends`` and ``receives``: messages of one tensor to and from stages on other ranks. ``gathers``: all-gathers of
        units. ``reductions``: reduce-scatters and all-reduces of gradients, those of tied parameters over stages among them.
        What several stages of a rank share counts for the first that does it. Collectives inside of stages' forward and
        backward (tensor parallelism, experts) do not count, nor the broadcast of the loss.

        ``batch`` has tensors with values. Raises PlanError for one that the stages do not fit.
        """
        known = self.traced(batch)
        found = {s: {"sends": 0, "receives": 0, "gathers": 0, "reductions": 0} for s in range(self.cut.num_stages)}
        for stage, messages in self.schedule.messages().items():
            for number, into, out in ((stage, "receives", "sends"), (stage + 1, "sends", "receives")):
                boundary = known.boundaries.get(number)
                if boundary is not None:
                    found[stage][into] += messages[f"forward_{into}"] * boundary.num_tensors
                    found[stage][out] += messages[f"backward_{out}"] * sum(boundary.requires_grad)
        part = self._inputs(batch)
        meta = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in part.items()}
        gradients = predict(self.program, self.skeleton, meta).gradients
        for rank in range(len(self.schedule.actions)):
            self._count_units(rank, found)
            self._count_reductions(rank, gradients, found)
        return found

    def _count_units(self, rank: int, found: dict[int, dict[str, int]]) -> None:
        own = frozenset(self.schedule.stages_of(rank))
        program = program_of_stages(self.skeleton, self.program, self.cut, own)
        units = [
            (unit_buckets_of(program, self.skeleton, i.path, i.op), i.op) for i in program if isinstance(i.op, Unit)
        ]
        asks = {
            b.path: True for buckets, unit in units for b in buckets if unit.reshard_after_forward not in (None, False)
        }
        buckets = [bucket for each, _ in units for bucket in each]
        let_go = releases(self.schedule.actions[rank])
        gathered: set[int] = set()
        resident: set[int] = set()
        once = self.entry.reduce == "step"
        reduced: set[int] = set()
        ended: dict[int, set[int]] = {}
        for action in self.schedule.actions[rank]:
            resident = (resident - set(let_go.get(action, ()))) | {action.stage}
            if action.kind in "BW":
                ended.setdefault(action.microbatch, set()).add(action.stage)
            for number, bucket in enumerate(buckets):
                stages = stages_of_unit(bucket.path, self.cut, own)
                if not stages & resident:
                    gathered.discard(number)
                if action.stage not in stages:
                    continue
                if action.kind != "W" and number not in gathered and bucket.num_ranks > 1:
                    found[action.stage]["gathers"] += 1
                    gathered.add(number)
                if bucket.path in asks:
                    gathered.discard(number)
                if once:
                    ends = action.kind in "BW" and action.stage == min(stages) and number not in reduced
                else:
                    ends = action.kind in "BW" and stages <= ended[action.microbatch]
                if ends and bucket.requires_grad:
                    reduced.add(number)
                    found[action.stage]["reductions"] += sum(
                        op in ("reduce_scatter", "all_reduce") for _, op, _, _ in bucket.collectives
                    )

    def _count_reductions(self, rank: int, gradients: Any, found: dict[int, dict[str, int]]) -> None:
        own = frozenset(self.schedule.stages_of(rank))
        mine = [gradient for gradient in gradients if self.cut.owners[gradient.name.removesuffix(".grad")] & own]
        for bucket in predict_buckets(mine, self.program.axes):
            stage = min(self.cut.owners[bucket.names[0].removesuffix(".grad")] & own)
            found[stage]["reductions"] += len(bucket.collectives)
        for name, stages in self.cut.owners.items():
            ranks = {self.schedule.rank_of[stage] for stage in stages}
            if len(ranks) > 1 and rank in ranks and self.skeleton.get_parameter(name).requires_grad:
                found[min(stages & own)]["reductions"] += 1


def check_stages(plan: Plan, model: nn.Module, inputs: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """What :func:`vescale.ir.check` finds in a plan; where that is no error, why the plan's pipeline does not fit the
    model."""
    found = check(plan, model, inputs)
    if plan.pipeline_entry is not None and not any(finding.severity == "error" for finding in found):
        try:
            StagedProgram.of(plan, model)
        except PlanError as error:
            return (Finding("error", "pipeline", error.problem, error.source, ()),)
    return found


def unit_buckets_of(program: Program, model: nn.Module, path: str, unit: Unit) -> tuple[UnitBucket, ...]:
    """The buffers of one unit of a program."""
    kept = tuple(i for i in program if not isinstance(i.op, Unit) or (i.path == path and i.op is unit))
    return unit_buckets(Program(program.axes, kept), model)


def stages_of_unit(path: str, cut: Cut, own: frozenset[int]) -> frozenset[int]:
    """The stages, of a rank's, during whose forward the unit of a module is gathered."""
    for around in (path, *_around(path)):
        if around in cut.bound:
            return cut.bound[around] & own
    return own


def _around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
