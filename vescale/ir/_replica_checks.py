"""Checks of hybrid sharding: replicas on the outer axis of a mesh must take part in the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import regex
from torch.distributed.device_mesh import DeviceMesh

from vescale.compat import root_mesh
from vescale.errors import ParallelizeError
from vescale.ir._findings import Findings
from vescale.ir._units import GatheredUnit
from vescale.plans import (
    AttentionEntry,
    CheckpointEntry,
    Entry,
    LocalEntry,
    Plan,
    PrecisionEntry,
    RedistributeEntry,
    UnitEntry,
)

__all__ = ["axes_named", "check_replicas", "refuse_part_of_replicas"]

_DATA_PARALLEL = regex.compile(r"(?:.*_)?(d?dp|hsdp|data|replicas?|replicate|rep|outer)(?:_.*)?")


def check_replicas(plan: Plan, units: Sequence[GatheredUnit], findings: Findings) -> None:
    """Errors for hybrid sharding of which only the sharded axis was written: replicas that would train apart (a plan on a
    slice of the mesh), or that would repeat each other's work (an axis that no entry names)."""
    if not units:
        return
    first = units[0]
    source = next((entry.source for entry in plan.entries if axes_named(entry).intersection(first.shard)), None)
    if plan.mesh is not None:
        problem = _missing_axes(plan.mesh, first.shard)
        if problem:
            findings.error("replicas", problem, source)
            return
    named = {axis for entry in plan.entries for axis in axes_named(entry)}
    idle = [axis for axis in plan.axes if axis not in named and plan.axes.size(axis) > 1 and _holds_data(axis)]
    if idle:
        findings.error(
            "replicas",
            f"parameters are sharded over {_quoted(first.shard)} alone, and no entry names {_quoted(idle)}, whose "
            f"{math.prod(plan.axes.size(axis) for axis in idle)} ranks would repeat the same work; for hybrid sharding cut "
            f"the batch over both, '<in:name>': {{{', '.join(f'{axis}: S(0)' for axis in (idle[0], *first.shard))}}}",
            source,
        )


def refuse_part_of_replicas(mesh: DeviceMesh, shard: Sequence[str]) -> None:
    """The same for a mesh that a plan over names and sizes is used on. Raises PlanError."""
    problem = _missing_axes(mesh, shard)
    if problem:
        raise ParallelizeError(problem)


def _missing_axes(mesh: DeviceMesh, shard: Sequence[str]) -> str:
    root = root_mesh(mesh)
    own, names = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    missing = [name for axis, name in enumerate(names) if name not in own and root.size(axis) > 1 and _holds_data(name)]
    if not missing or root == mesh or not set(own) <= set(names):
        return ""
    wanted = tuple(name for name in names if name in own or name in missing)
    return (
        f"parameters are sharded over {_quoted(shard)} of a mesh with axes {own}, a slice of one with axes {names}: the "
        f"replicas along {_quoted(missing)} would never share a gradient, and drift apart; write the plan for "
        f"mesh{list(wanted)} and cut the batch over {_quoted([*missing, *shard])} (hybrid sharding); for models that are "
        "meant to train apart, make their mesh by itself"
    )


def _holds_data(axis: str) -> bool:
    return _DATA_PARALLEL.fullmatch(axis.lower()) is not None


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def axes_named(entry: Entry) -> set[str]:
    """The axes that an entry names."""
    if isinstance(entry, UnitEntry | PrecisionEntry | CheckpointEntry):
        return set()
    if isinstance(entry, AttentionEntry):
        return {axis for axis, _ in entry.methods}
    if isinstance(entry, LocalEntry):
        sides = (entry.inputs, entry.outputs)
    elif isinstance(entry, RedistributeEntry):
        sides = (entry.src, entry.dst)
    else:
        sides = (entry.placements, ())
    return {axis for side in sides for axis, _ in side}
