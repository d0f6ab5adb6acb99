"""``Choice``: a mesh and everything that a search chooses for it, and the plan that says so."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from vescale.estimation import zero_plan
from vescale.plan_search._sources import PlanSource, on_axes, with_batch_on, with_experts_on, without_sends
from vescale.plans import Plan

REPLICAS = "dp_replicas"


@dataclass(frozen=True)
class Model:
    """What of a model decides which entries a plan gets.

    Attributes:
        blocks: expressions for the paths of its repeated blocks; ``units``: of what is gathered together.
        num_blocks: of the longest list of equal blocks.
        experts: expressions for the parameters of experts; empty without regions of experts.
        expert_names: of such parameters, some of each kind.
        num_experts: the most that one module has.
    """

    blocks: tuple[str, ...]
    units: tuple[str, ...]
    num_blocks: int
    experts: tuple[str, ...] = ()
    expert_names: tuple[str, ...] = ()
    num_experts: int = 0


@dataclass(frozen=True)
class Choice:
    """A mesh, and how a plan uses its axes.

    Attributes:
        source: where the entries for ``tp`` and the inputs come from: the zoo, the model, or ``vescale.new_plan``.
        pp: the number of pipeline stages.
        replicas: with hybrid sharding, the number of copies of the sharded parameters.
        dp: the number of ranks over which the batch and, with ZeRO, the parameters are sharded.
        cp: the number of parts of the sequence in attention.
        ep: the number of ranks over which experts are sharded.
        tp: the number of ranks of tensor parallelism.
        zero: the stage of ZeRO over ``dp``.
        checkpoint: ``none``, or the checkpointing policy of all repeated blocks.
        schedule: of the pipeline; empty without stages.
        microbatches: of the pipeline; 1 without stages.
    """

    source: PlanSource
    pp: int = 1
    replicas: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    zero: int = 0
    checkpoint: str = "none"
    schedule: str = ""
    microbatches: int = 1

    @property
    def axes(self) -> dict[str, int]:
        """The axes that have several ranks, with their sizes. The axis that moves most bytes is the last."""
        return {name: size for name, size in self.all_axes.items() if size > 1} or {"dp": 1}

    @property
    def all_axes(self) -> dict[str, int]:
        """As ``axes``, and always with ``dp`` and ``tp``."""
        optional = {"pp": self.pp, REPLICAS: self.replicas}
        found = {name: size for name, size in optional.items() if size > 1}
        found["dp"] = self.dp
        found.update({name: size for name, size in {"cp": self.cp, "ep": self.ep}.items() if size > 1})
        return {**found, "tp": self.tp}

    @property
    def batch_ranks(self) -> int:
        """The number of parts into which the batch is split."""
        return self.replicas * self.dp * self.ep

    @property
    def stages_per_rank(self) -> int:
        """How many pipeline stages a rank has: 2 with an interleaved schedule, otherwise 1."""
        return 2 if self.schedule.startswith("Interleaved") else 1

    def cell(self, rows: int) -> Choice:
        """What decides the ops that a rank runs, without ZeRO and stages, for a batch of so many rows: the same for choices
        that differ in how ranks of data and of stages are grouped."""
        ranks = self.pp * self.replicas * self.dp
        most = math.gcd(max(rows // self.ep, 1), ranks)
        return replace(self, pp=1, replicas=1, dp=most, zero=0, schedule="", microbatches=1)

    def describe(self) -> dict[str, Any]:
        """The choice as plain data, for JSON."""
        return {
            "mesh": self.axes,
            "source": self.source.name,
            "sequence_parallel": self.source.sequence and self.tp > 1,
            "zero": self.zero,
            "checkpoint": self.checkpoint,
            "pipeline": {"schedule": self.schedule, "microbatches": self.microbatches} if self.pp > 1 else None,
        }

    def __str__(self) -> str:
        sizes = ",".join(f"{name}={size}" for name, size in self.axes.items() if size > 1) or "one device"
        parts = [sizes]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}")
        if self.tp > 1 and not self.source.sequence:
            parts.append("whole sequences")
        if self.checkpoint != "none":
            parts.append(f"{self.checkpoint} checkpointing")
        if self.pp > 1:
            parts.append(f"{self.schedule}, {self.microbatches} micro-batches")
        return ", ".join(parts)


def plan_of(choice: Choice, model: Model, precision: str | None = None) -> Plan:
    """The plan of a choice. Raises PlanError where the source has none for its mesh.

    Args:
        choice: what the plan does.
        model: whose plan it is.
        precision: a dtype to compute in; gradients are reduced in float32.
    """
    make = choice.source.context if choice.cp > 1 else choice.source.make
    assert make is not None, "choices with cp need a source with a plan for it"
    plan = make(choice.all_axes)
    if choice.replicas > 1:
        plan = with_batch_on(plan, (REPLICAS,))
    if choice.ep > 1:
        plan = with_experts_on(plan, "ep", model.experts)
    plan = without_sends(on_axes(plan, choice.axes), model.expert_names)
    if choice.zero:
        plan = zero_plan(plan, ("dp",), choice.zero, model.units)
    if choice.checkpoint != "none":
        for path in model.blocks:
            plan.checkpoint(path, choice.checkpoint)
    if precision is not None:
        plan.precision("", param=precision, reduce="float32")
    if choice.pp > 1:
        plan.pipeline(
            balance="cost",
            mesh="pp",
            schedule=choice.schedule,
            microbatches=choice.microbatches,
            stages_per_rank=choice.stages_per_rank,
        )
    return plan
