"""``Plan``: how each tensor of a model is placed on a mesh, as data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Self

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.errors import EntryError, Source, calling_line, did_you_mean
from vescale.placements import RaggedShard
from vescale.plans._entries import INIT, RUN, ShardEntry, Target
from vescale.plans._hf_import import add_hf_entries, add_parallel_plan
from vescale.plans._mesh_axes import MeshAxes
from vescale.plans._plan_entries import PlanEntries, pipeline_entry
from vescale.plans._yaml_reader import read_plan
from vescale.plans._yaml_writer import plan_text


class Plan(PlanEntries):
    """An ordered list of entries over the axes of a mesh, independent of any model.

    ::

        plan = Plan(mesh)
        plan.shard(r"model.layers.\\d+.mlp.up_proj.weight", Shard(0), mesh="tp")
        plan.shard("<in:input_ids>", Shard(0), mesh="dp")

    Every entry is checked the moment it is written (path, axis, placement); what needs a model is checked by
    ``lower(plan, model)``. Entries are never removed, and changed by :meth:`local_inputs` only. Two plans are equal when
    their axes and entries are. All methods that add an entry take ``source``, where it is written, for messages; without
    it, that is the calling line.

    Args:
        mesh: a DeviceMesh with axis names, or ``{axis: size}`` to write, check and lower a plan without devices.
        inputs: what ordinary tensors are that the model is called with: ``"global"``, the same on every rank, or
            ``"local"``, this rank's part, as a data loader with a sampler reads it. Holds for the entries of ``<in:name>``
            that are written afterwards.

    Raises:
        PlanError: from every method, with the line of the call.
    """

    def local_inputs(self) -> Self:
        """Every rank passes its own part of the model's inputs: ``given="local"`` for all entries of ``<in>`` so far, as of
        a plan from the zoo or from :meth:`from_hf`. Returns the plan.

        Raises PlanError if no entry places an input of the model.
        """
        is_input = [
            isinstance(e, ShardEntry) and e.path.target is Target.IN and e.path.pattern == "" for e in self._entries
        ]
        if not any(is_input):
            raise EntryError(
                "local_inputs: no entry places an input of the model; write them first, as "
                "plan.shard('<in:input_ids>', Shard(0), mesh='dp')",
                calling_line(),
            )
        self._entries = [
            replace(entry, given="local") if found and isinstance(entry, ShardEntry) else entry
            for entry, found in zip(self._entries, is_input, strict=True)
        ]
        return self

    def zero(
        self,
        stage: Literal[1, 2, 3] = 3,
        *,
        axis: str | Sequence[str] = "dp",
        path: str = ".*",
        units: str | Sequence[str] = (),
        source: Source | None = None,
    ) -> Self:
        """Adds the entries of ZeRO: between steps, parameters, gradients and optimizer states are sharded over ``axis``, and
        parameters are gathered while they are used. The batch is sharded over the same axis by a separate entry.

        Args:
            stage: 3 gathers parameters for the forward and for the backward of each unit; 2 keeps them in between; 1 keeps
                them and unreduced gradients through all backwards that accumulate.
            axis: over which axis, or jointly over which axes.
            path: which parameters; all of them by default.
            units: the modules that are gathered as one, as ``"layers.\\d+"``. By default the model's repeated blocks, for
                stage 3 alone: stages 1 and 2 must name them (``""`` is the model itself).
            source: where the entries were written; by default the calling line.

        Returns the plan.
        """
        source = source or calling_line()
        if stage not in (1, 2, 3) or isinstance(stage, bool):
            raise EntryError(f"zero: stage is {stage!r}; use 1, 2 or 3", source)
        paths = (units,) if isinstance(units, str) else tuple(units)
        if stage < 3 and not paths:
            raise EntryError(
                f"zero: stage {stage} shards the parameters of units, but no unit is named; name the model's blocks, "
                "as in units='layers.\\d+', or units=['layers.\\d+', ''] with the model itself",
                source,
            )
        self.shard(path, RaggedShard(), phase=INIT, axis=axis, source=source)
        self.shard(path, Replicate(), phase=RUN, axis=axis, source=source)
        forward, backward = None if stage == 3 else False, False if stage == 1 else None
        for unit in paths:
            self.unit(unit, reshard_after_forward=forward, reshard_after_backward=backward, source=source)
        return self

    def pipeline(
        self,
        *,
        split_before: Sequence[str] | None = None,
        stages: Sequence[Sequence[str]] | None = None,
        balance: Literal["cost"] | None = None,
        mesh: str = "pp",
        axis: str | None = None,
        schedule: str = "1F1B",
        microbatches: int = 8,
        loss: str | Callable[[Any, Mapping[str, Any]], tuple[Any, Any]] = "out.loss",
        reduce: Literal["step", "microbatch"] = "step",
        rows: Literal["batch", "microbatch"] = "batch",
        stages_per_rank: int | None = None,
        costs: Mapping[str, float] | None = None,
        memory_gib: float | None = None,
        microbatch_shape: Sequence[int] | None = None,
        source: Source | None = None,
    ) -> Self:
        """Cut the model into stages, which ranks along the axis ``mesh`` run; once in a plan. No other entry names it.

        Args:
            split_before: the modules at which a stage begins: ``["model.layers.8", "model.layers.16"]`` creates three
                stages.
            stages: for each stage, modules that belong to it; it begins before the first.
            mesh: the same as ``axis``.
            axis: the axis of the mesh for the stages (default: ``"pp"``).
            balance: ``"cost"`` splits the model's repeated blocks so that the slowest stage is as fast as possible.
            schedule: a name of ``torch.distributed.pipelining`` (case does not matter; also ``"ZBV"``), or CSV text.
            microbatches: the number of equal parts of the batch, split along dim 0.
            loss: a path into the model's output; or ``f(out, batch) -> (sum, count)`` of a micro-batch.
            reduce: gradients of units (ZeRO) are reduced once a step, which keeps unreduced ones for all micro-batches, or
                after each micro-batch's backward. All others are reduced once a step.
            rows: what the forward computes across rows (statistics, pairs) is that of the batch, or refused; or that of each
                micro-batch by itself, as gradient accumulation has it.
            stages_per_rank: with ``balance``: the number of stages on each rank.
            costs: with ``balance``: the cost of each block, and of modules around the blocks, by path, in any unit;
                what :func:`vescale.pipeline.measure_costs` returns. Without, the operations of a forward are counted.
            memory_gib: with ``balance``: the most that parameters, their gradients and two states of an optimizer may
                take on a rank, before other axes shard them.
            microbatch_shape: with ``memory_gib``: rows and tokens of a micro-batch; with it, the limit is also for what
                forwards hold for backward.

        See docs/pipeline.md. Returns the plan.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "axis")}
        given |= {"mesh": mesh if axis is None else axis, "source": source or calling_line()}
        if self._pipeline is not None:
            problem = f"pipeline: the plan already has one, from {self._pipeline.source}; keep one"
            raise EntryError(problem, given["source"])
        self._pipeline = pipeline_entry(self.axes, **given)
        return self

    @classmethod
    def from_yaml(
        cls,
        file: str | os.PathLike[str],
        mesh: DeviceMesh | Mapping[str, int] | MeshAxes | None = None,
    ) -> Plan:
        """Read a plan from a YAML file (a path), or from YAML text (a str with a line break).

        ``mesh`` overrides the sizes in the file, whose axis names it must have; without it the file's ``mesh`` section
        must give all sizes. Nothing in a plan is ever executed.

        Args:
            file: a path, or YAML text.

        Raises:
            PlanError: with line and column, for bad YAML, a duplicate key, anything outside the schema, a bad path or
                placement, an unknown axis.
        """
        return read_plan(file, mesh, cls)

    @classmethod
    def from_hf(
        cls,
        model: nn.Module,
        mesh: DeviceMesh | Mapping[str, int] | MeshAxes,
        axis: str = "tp",
        *,
        expert_axis: str | None = None,
        dispatch: Literal["mask", "all_to_all"] = "mask",
        batch_axis: str | None = "dp",
        sequence_parallel: bool = False,
    ) -> Plan:
        """The plan that a Hugging Face model carries (``model.tp_plan``, ``model.ep_plan``), as an ordinary plan.

        Args:
            model: a transformers model, on any device, also the meta device; only names and shapes are read.
            axis: the mesh axis of tensor parallelism.
            expert_axis: the axis over which whole experts are distributed (``ep_plan``), which may be ``axis`` itself or the
                one of the batch; None: experts are sharded by ``tp_plan``.
            dispatch: how tokens are sent to experts on other ranks, with ``expert_axis``.
            batch_axis: the axis that shards the batch of the model's inputs, if the mesh has it.
            sequence_parallel: shard the sequence over ``axis`` between the parts of each layer, which transformers' plans do
                not: derived from the sums of the plan.

        Rules that match nothing in this model are ignored. Parameters that ``axis`` cannot shard evenly, or only inside
        attention heads, stay whole, with one :class:`HfImportWarning`; ``vescale.ir.coverage`` returns the share that is
        sharded.

        Raises:
            PlanError: a model without a plan, an unknown style, an axis that the mesh does not have.
        """
        plan = cls(mesh)
        for name in (axis, expert_axis):
            if name is not None and name not in plan.axes:
                raise EntryError(
                    f"Plan.from_hf: the mesh has no axis {name!r} (axes: {', '.join(plan.axes.names)})"
                    f"{did_you_mean(name, plan.axes.names)}; pass axis= or expert_axis=",
                    calling_line(),
                )
        add_hf_entries(plan, model, axis, expert_axis, dispatch, batch_axis, sequence_parallel)
        return plan

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        mesh: DeviceMesh | Mapping[str, int] | MeshAxes,
        *,
        axes: Mapping[str, str] | None = None,
        dispatch: Literal["mask", "all_to_all"] = "all_to_all",
        batch_axes: Sequence[str] | None = None,
        shard_axis: str | None = "fsdp",
    ) -> Plan:
        """The plan that a model's own ``get_parallel_plan()`` returns (VeOmni's form), as an ordinary plan.

        Args:
            model: on any device; only names and shapes are read.
            axes: ``{name in the parallel plan: axis of the mesh}``, if they differ.
            dispatch: how tokens are sent to experts on other ranks.
            batch_axes: axes that shard the batch of the model's inputs; None: ``dp``, ``shard_axis``, and the axes of the
                parallel plan, which share the ranks of data parallelism.
            shard_axis: the axis of sharded data parallelism, if the mesh has it: at rest, parameters are sharded once over
                it and those axes of the parallel plan that shard the batch, without axes that shard them already.

        Experts get a region, and embeddings the entries that sum the looked-up rows over ranks. Patterns that match
        nothing in this model are ignored, as long as one pattern of each axis matches.

        Raises:
            PlanError: no parallel plan, an axis that the mesh does not have, a placement or parameter whose sharding has no
                known meaning, sizes that do not divide.
        """
        plan = cls(mesh)
        add_parallel_plan(plan, model, axes or {}, dispatch, batch_axes, shard_axis)
        return plan

    def to_yaml(self) -> str:
        """The plan as YAML text; ``Plan.from_yaml(plan.to_yaml()) == plan``."""
        return plan_text(self)
