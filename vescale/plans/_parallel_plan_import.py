"""``Plan.from_model``: the parallel plan that a model's own ``get_parallel_plan()`` returns, as an ordinary plan.

VeOmni's models carry such plans: for each extra parallel axis (``ep`` for experts, ``emb`` for embeddings) patterns of
parameter names, in which ``*`` stands for one part of a name, and a placement. They contain parameters only; regions of
experts, the placements of summed embeddings, and those of the other parameters are added here. The object is read by its
attributes (``extra_parallel_plan``, or ``ep_plan`` of earlier versions); a dict ``{axis: {pattern: placement}}`` is
accepted, too.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.errors import DerivedPlanError, PlanError, did_you_mean
from vescale.placements import RaggedShard
from vescale.plans._entries import INIT, RUN
from vescale.plans._hf_import import BATCHED_INPUTS, expressions
from vescale.plans._plan_entries import PlanEntries

_Patterns = Mapping[str, Any]


def add_parallel_plan(
    plan: PlanEntries,
    model: nn.Module,
    axes: Mapping[str, str],
    dispatch: str,
    batch_axes: Sequence[str] | None,
    shard_axis: str | None,
) -> None:
    """See :meth:`Plan.from_model`."""
    reader = _Reader(plan, model, dispatch)
    found = {axes.get(name, name): patterns for name, patterns in reader.patterns().items()}
    sharded = [shard_axis] if shard_axis is not None and shard_axis in plan.axes else []
    if batch_axes is None:
        batch_axes = [axis for axis in plan.axes if axis == "dp" or axis in sharded or axis in found]
    for axis in (*found, *batch_axes):
        if axis not in plan.axes:
            raise DerivedPlanError(
                f"Plan.from_model: the mesh has no axis {axis!r} (axes: "
                f"{', '.join(plan.axes.names)}){did_you_mean(axis, plan.axes.names)}; rename the axis of the mesh, or "
                f"pass axes={{{axis!r}: ...}}"
            )
    for axis, patterns in found.items():
        reader.read(axis, patterns, axis in batch_axes)
    if sharded:
        reader.rest([axis for axis in plan.axes if axis in sharded or (axis in found and axis in batch_axes)])
    for name in BATCHED_INPUTS:
        if batch_axes and name in inspect.signature(model.forward).parameters:
            plan.shard(f"<in:{name}>", dict.fromkeys(batch_axes, Shard(0)))


class _Reader:
    def __init__(self, plan: PlanEntries, model: nn.Module, dispatch: str) -> None:
        self.plan, self.model, self.dispatch = plan, model, dispatch
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.cut: dict[int, dict[str, None]] = {}  # by ``id`` of a parameter, the axes that cut it
        self.kind = type(model).__name__

    def patterns(self) -> dict[str, _Patterns]:
        """By name of the parallel axis, those without patterns left out."""
        get = getattr(self.model, "get_parallel_plan", None)
        if not callable(get):
            raise DerivedPlanError(
                f"{self.kind} has no get_parallel_plan(); Plan.from_hf reads the plans of transformers, and plan_zoo has "
                "plans for well-known models"
            )
        given = get()
        found = given if isinstance(given, Mapping) else getattr(given, "extra_parallel_plan", None)
        if not found and isinstance(getattr(given, "ep_plan", None), Mapping):
            found = {"ep": given.ep_plan}
        if not isinstance(found, Mapping) or not all(
            isinstance(patterns, Mapping | None) for patterns in found.values()
        ):
            raise DerivedPlanError(
                f"{self.kind}.get_parallel_plan() returns {type(given).__name__}, which is not a parallel plan; expected an "
                "extra_parallel_plan of {axis: {parameter pattern: placement}}, or an ep_plan of {pattern: placement}"
            )
        return {str(name): patterns for name, patterns in found.items() if patterns}

    def read(self, axis: str, patterns: _Patterns, cuts_batch: bool) -> None:
        experts: dict[str, None] = {}
        matched = False
        for pattern, placement in patterns.items():
            names = self._matching(pattern)
            matched |= bool(names)
            if not names or isinstance(placement, Replicate):
                continue
            if type(placement) is not Shard or placement.dim != 0:
                raise self._error(pattern, axis, f"has placement {placement!r}", "Shard(0) or Replicate()")
            for name in names:
                self._check(pattern, axis, name)
                self.cut.setdefault(id(self.parameters[name]), {})[axis] = None
                owner = name.rpartition(".")[0]
                if self.parameters[name].ndim > 2:
                    experts[owner] = None
            for expression in expressions(names, self.parameters):
                self.plan.shard(expression, Shard(0), mesh=axis)
            self._embeddings(names, axis, cuts_batch)
        if not matched:
            raise DerivedPlanError(
                f"{self.kind}.get_parallel_plan(): no parameter matches the patterns for {axis!r}: {', '.join(patterns)}"
                f"{did_you_mean(next(iter(patterns)), list(self.parameters))}"
            )
        for expression in expressions(experts, dict(self.model.named_modules())):
            self.plan.local(expression, kind="experts", dispatch=self.dispatch)

    def rest(self, axes: Sequence[str]) -> None:
        """At rest every parameter is sharded once over those of ``axes`` that do not shard it already."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, parameter in self.parameters.items():
            if id(parameter) in self.cut:
                alike.setdefault(tuple(self.cut[id(parameter)]), []).append(name)
        others = []
        for cut, names in alike.items():
            found = expressions(names, self.parameters)
            others += found
            for expression in found:
                self._rest(expression, [axis for axis in axes if axis not in cut])
        self._rest(f"(?!({'|'.join(others)})$).*", axes)

    def _rest(self, expression: str, axes: Sequence[str]) -> None:
        if axes:
            self.plan.shard(expression, RaggedShard(), mesh=axes, phase=INIT)
            self.plan.shard(expression, Replicate(), mesh=axes, phase=RUN)

    def _matching(self, pattern: Any) -> list[str]:
        expression = re.compile(r"[^.]+".join(map(re.escape, str(pattern).split("*"))))
        return [name for name in self.parameters if expression.fullmatch(name)]

    def _check(self, pattern: str, axis: str, name: str) -> None:
        """Raise unless sharding dim 0 has a known meaning for this parameter."""
        owner, parameter = self.model.get_submodule(name.rpartition(".")[0]), self.parameters[name]
        size = self.plan.axes.size(axis)
        if not (isinstance(owner, nn.Embedding) or parameter.ndim > 2 or self._belongs_to_stack(owner)):
            raise self._error(
                pattern,
                axis,
                f"shards {name} of shape {tuple(parameter.shape)}",
                "weights that hold all experts in dim 0, or those of an nn.Embedding (the weight of a single expert "
                "cannot be distributed: stack them); write other placements with Plan.shard",
            )
        if parameter.shape[0] % size:
            raise self._error(
                pattern,
                axis,
                f"shards {name}, {parameter.shape[0]} in dim 0, over {size} ranks",
                "a number of ranks that divides it",
            )

    def _belongs_to_stack(self, owner: nn.Module) -> bool:
        """Biases beside stacked weights."""
        return any(isinstance(p, torch.Tensor) and p.ndim > 2 for p in owner.parameters(recurse=False))

    def _embeddings(self, names: Sequence[str], axis: str, cuts_batch: bool) -> None:
        """Every rank looks up all indices in its rows, and the results are summed."""
        owners = [name.rpartition(".")[0] for name in names]
        chosen = [owner for owner in owners if isinstance(self.model.get_submodule(owner), nn.Embedding)]
        for expression in expressions(chosen, dict(self.model.named_modules())):
            self.plan.shard(f"{expression}.<in>", Replicate(), mesh=axis)
            self.plan.shard(f"{expression}.<out>", Shard(0) if cuts_batch else Replicate(), mesh=axis)

    def _error(self, pattern: str, axis: str, found: str, expected: str) -> PlanError:
        return DerivedPlanError(
            f"{self.kind}.get_parallel_plan(): {pattern!r} on {axis!r} {found}; Plan.from_model reads {expected}"
        )
