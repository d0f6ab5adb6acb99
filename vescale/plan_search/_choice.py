"""``Choice``: a mesh and everything that a search chooses for it, and the plan that says so."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard

from vescale import plan_zoo
from vescale.estimation import zero_plan
from vescale.ir import check, coverage, new_plan
from vescale.placements import shard_dim
from vescale.plans import LocalEntry, Plan, ShardEntry

# Where a search's plans come from: the zoo, the plan that a Hugging Face model carries, or ``new_plan``.


@dataclass(frozen=True)
class PlanSource:
    """Makes plans without ZeRO for meshes with the axes ``dp`` and ``tp``, and others.

    Attributes:
        name: ``zoo:llama``, ``hf`` (what the model carries) or ``new`` (``new_plan``).
        sequence: the sequence is cut over ``tp`` between the parts of layers.
        make: of names and sizes of axes; raises PlanError where the model does not take them.
        context: the plan that also cuts the sequence over ``cp``; None: there is none.
    """

    name: str
    sequence: bool
    make: Callable[[Mapping[str, int]], Plan]
    context: Callable[[Mapping[str, int]], Plan] | None = None


def plan_sources(model: nn.Module, reduced: nn.Module, inputs: Mapping[str, Any]) -> tuple[PlanSource, ...]:
    """One source that cuts the sequence between the parts of layers, and one that does not, each the first there is of the
    zoo, the model's own plan and ``new_plan``.

    Args:
        model: the whole model, on the meta device.
        reduced: the same with the first and the last of equal modules.
        inputs: of the forward, to trace it for a new plan.
    """
    return (_with_sequence(model, reduced, inputs), _without_sequence(model, inputs))


def _with_sequence(model: nn.Module, reduced: nn.Module, inputs: Mapping[str, Any]) -> PlanSource:
    name = _zoo_name(model, reduced)
    if name is not None:
        with_context = f"{name}_cp" if f"{name}_cp" in plan_zoo.names() else None
        return PlanSource(f"zoo:{name}", True, _of_zoo(name), _of_zoo(with_context) if with_context else None)
    if getattr(model, "tp_plan", None):
        return PlanSource("hf", True, _of_model(model, True))
    return PlanSource("new", True, _written(model, inputs, True))


def _without_sequence(model: nn.Module, inputs: Mapping[str, Any]) -> PlanSource:
    if getattr(model, "tp_plan", None):
        return PlanSource("hf", False, _of_model(model, False))
    return PlanSource("new", False, _written(model, inputs, False))


def _zoo_name(model: nn.Module, reduced: nn.Module) -> str | None:
    """The plan of the zoo that fits: the one of the model's type, else the one that cuts most; a plan with a finding does
    not fit."""
    own = str(getattr(getattr(model, "config", None), "model_type", ""))
    names = [n for n in plan_zoo.names() if plan_zoo.about(n).axes == ("dp", "tp") and not n.endswith("_zero3")]
    if own in names and not check(plan_zoo.load(own, {"dp": 1, "tp": 1}), reduced):
        return own
    fit = [n for n in names if n != own and not check(plan_zoo.load(n, {"dp": 1, "tp": 1}), reduced)]
    return max(fit, key=lambda n: coverage(plan_zoo.load(n, {"dp": 1, "tp": 2}), reduced).parameters, default=None)


def _of_zoo(name: str) -> Callable[[Mapping[str, int]], Plan]:
    return lambda axes: plan_zoo.load(name, axes)


def _of_model(model: nn.Module, sequence: bool) -> Callable[[Mapping[str, int]], Plan]:
    def make(axes: Mapping[str, int]) -> Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what tp does not divide stays whole
            return Plan.from_hf(model, axes, axis="tp", batch_axis="dp", sequence_parallel=sequence and axes["tp"] > 1)

    return make


def _written(model: nn.Module, inputs: Mapping[str, Any], sequence: bool) -> Callable[[Mapping[str, int]], Plan]:
    entries: dict[int, Plan] = {}

    def make(axes: Mapping[str, int]) -> Plan:
        if axes["tp"] not in entries:  # entries depend on nothing else
            entries[axes["tp"]] = new_plan(model, {"dp": 2, "tp": axes["tp"]}, inputs, sequence=sequence)
        plan = Plan(axes)
        for entry in entries[axes["tp"]].entries:
            plan.add(entry)
        return plan

    return make


def on_axes(plan: Plan, axes: Mapping[str, int]) -> Plan:
    """``plan`` for a mesh that lacks some of its axes, which have one rank: nothing is cut over them."""
    found = Plan(axes)
    for entry in plan.entries:
        changes: dict[str, Any] = {}
        for field in fields(entry):
            pairs = getattr(entry, field.name)
            if isinstance(pairs, tuple) and pairs and all(isinstance(p, tuple) and p[0] in plan.axes for p in pairs):
                changes[field.name] = tuple(pair for pair in pairs if pair[0] in axes)
        if not changes or any(changes.values()):
            found.add(replace(entry, **changes))
    return found


def with_batch_on(plan: Plan, axes: tuple[str, ...]) -> Plan:
    """``plan`` with the batch cut over ``axes``, too, in front of those that follow ``dp``."""
    found = Plan(plan.axes)
    for entry in plan.entries:
        if isinstance(entry, ShardEntry) and entry.path.text.startswith("<in"):
            cut = [p for axis, p in entry.placements if axis == "dp" and shard_dim(p) == 0]
            entry = replace(entry, placements=(*((axis, cut[0]) for axis in axes if cut), *entry.placements))
        found.add(entry)
    return found


def with_experts_on(plan: Plan, axis: str, paths: tuple[str, ...]) -> Plan:
    """``plan`` with whole experts spread over ``axis``, which also cuts the batch.

    Args:
        plan: spreads none; its modules of experts have ``local`` entries.
        paths: expressions for the parameters of experts, whose dim 0 counts experts.
    """
    found = with_batch_on(plan, (axis,))
    for path in paths:
        found.shard(path, Shard(0), mesh=axis)
    return found


def without_sends(plan: Plan, names: tuple[str, ...]) -> Plan:
    """``plan`` without sending tokens to experts that no axis of its mesh spreads: each rank has all of them.

    Args:
        plan: has entries for axes of its mesh only.
        names: of parameters of experts, whose dim 0 counts experts.
    """
    cuts = [e for e in plan.entries if isinstance(e, ShardEntry) and any(shard_dim(p) == 0 for _, p in e.placements)]
    spread = [name for name in names if any(e.path.matches(name) for e in cuts)]
    found = Plan(plan.axes)
    for entry in plan.entries:
        if isinstance(entry, LocalEntry) and entry.dispatch == "all_to_all":
            own = [name for name in names if entry.path.matches(name.rpartition(".")[0])]
            if own and not set(own) & set(spread):
                entry = replace(entry, dispatch=None)
        found.add(entry)
    return found


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
