"""Warnings: plans that run, and probably not as meant."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._planned_placements import PlannedAxes
from vescale.ir._replica_checks import axes_named
from vescale.ir._resolution import Resolution
from vescale.ir._resolve import shown_name
from vescale.placements import RaggedShard, shard_dim
from vescale.plans import Plan

__all__ = ["lint"]


def lint(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """Add warnings."""
    _unused_axes(plan, findings)
    _redundant_entries(plan, resolution, index, findings)
    _ragged_while_running(plan, resolution, index, findings)
    _partial_outputs(plan, resolution, index, findings)
    _same_batch(plan, resolution, findings)


def _unused_axes(plan: Plan, findings: Findings) -> None:
    named = {axis for entry in plan.entries for axis in axes_named(entry)}
    for axis in plan.axes:
        if axis not in named and plan.axes.size(axis) > 1:
            findings.warning(
                "unused-axis",
                f"no entry names axis '{axis}': its {plan.axes.size(axis)} ranks hold and compute the same; for replicas "
                f"that share a batch (hybrid sharding), cut the inputs over it: '<in>': {{{axis}: S(0)}}",
                None,
            )


def _redundant_entries(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    used = {id(choice.entry) for planned in _all_roles(resolution) for choice in planned.items().values()}
    used |= {id(entry) for methods in resolution.attention.values() for _, entry in methods.values()}
    used |= {id(entry) for entry in (*resolution.locals.values(), *resolution.units.values())}
    used |= {id(entry) for entry in (*resolution.checkpoints.values(), *resolution.precisions.values())}
    for entry in plan.entries:
        states = [index.states.get(name) for name in resolution.matches.get(id(entry), ())]
        tied = any(state is not None and len(state.names) > 1 for state in states)  # it matters for untied models
        if id(entry) not in used and not tied:
            findings.warning(
                "redundant",
                f"'{entry.path}' says nothing that entries before it do not say of the same tensors; remove it",
                entry.source,
            )


def _all_roles(resolution: Resolution) -> Iterator[PlannedAxes]:
    for state in resolution.states.values():
        yield from (state.init, state.forward, state.backward, state.annotated, state.grad, state.grad_annotated)
    for boundary in resolution.boundaries.values():
        yield from (boundary.dst, boundary.src, boundary.grad_src, boundary.grad_dst, boundary.annotated)
    yield from resolution.factories.values()


def _ragged_while_running(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    for name, planned in resolution.states.items():
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            choice = planned.running_at(axis)
            if isinstance(placement, RaggedShard) and choice is not None:
                findings.warning(
                    "ragged-running",
                    f"{{names}} on axis '{axis}': ragged while the module computes, which few ops can read; add what it is "
                    f"then, usually '{choice.entry.path}': {{{axis}: {{init: Ragged, run: R}}}}",
                    choice.entry.source,
                    shown_name(index.states[name]),
                )


def _partial_outputs(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """A weight cut along the dim that is summed over leaves a sum on every rank; who adds them should be in the plan.

    Of the modules that share a tied weight some may only hold it, and never run: one that is settled is enough.
    """
    for name, planned in resolution.states.items():
        owners = [index.owner(tied) for tied in index.states[name].names]
        summed = {path: _summed_dim(index.modules[path]) for path, attribute in owners if attribute == "weight"}
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            dim = shard_dim(placement)
            paths = [path for path, of_module in summed.items() if dim is not None and of_module == dim]
            if not paths or any(_is_settled(path, axis, resolution) for path in paths):
                continue
            choice = planned.running_at(axis)
            findings.warning(
                "partial-output",
                f"{{names}} is cut along the dim that is summed over, so the output is a partial sum on '{axis}', and no "
                f"<out> entry of its module or one around it says what becomes of it; add <out>: {{{axis}: R}}, or S(dim)",
                choice.entry.source if choice is not None else None,
                shown_name(index.states[name]),
            )
    for (path, side, _), boundary in resolution.boundaries.items():
        if path == "" and side == "<out>":
            for axis, choice in boundary.dst.items().items():
                if isinstance(choice.placement, Partial):
                    findings.warning(
                        "partial-output",
                        f"'{choice.entry.path}' leaves the model's output a partial sum on '{axis}'; write R, or S(dim)",
                        choice.entry.source,
                    )


def _summed_dim(module: nn.Module) -> int | None:
    if isinstance(module, nn.Linear):
        return 1
    # An embedding whose rows are cut finds some indices on this rank only: zero elsewhere, to be summed.
    return 0 if isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D" else None


def _is_settled(path: str, axis: str, resolution: Resolution) -> bool:
    """Whether an ``<out>`` entry, or a local region, at the module or around it covers the axis."""
    around = list(enclosing(path))
    if any(module in resolution.locals for module in around):
        return True
    return any(
        module in around and side == "<out>" and planned.dst.get(axis) is not None
        for (module, side, _), planned in resolution.boundaries.items()
    )


def _same_batch(plan: Plan, resolution: Resolution, findings: Findings) -> None:
    """Parameters that are gathered over an axis to compute, and nothing that they compute with is cut over it: neither a
    batch nor, between modules, a sequence."""
    for position, axis in enumerate(plan.axes):
        gathered = [
            choice
            for planned in resolution.states.values()
            if (choice := planned.init.get(axis)) is not None
            and not isinstance(choice.placement, Replicate)
            and isinstance(planned.running(plan.axes)[position], Replicate)
        ]
        cut = any(
            (s := planned.dst.get(axis) or planned.src.get(axis)) and shard_dim(s.placement) is not None
            for planned in resolution.boundaries.values()
        )
        if gathered and not cut and plan.axes.size(axis) > 1:
            findings.warning(
                "same-batch",
                f"parameters are gathered over '{axis}' to compute, but no input of the model is cut over it: its "
                f"{plan.axes.size(axis)} ranks compute the same batch; add '<in>': {{{axis}: S(0)}}, or name the inputs",
                gathered[0].entry.source,
            )
