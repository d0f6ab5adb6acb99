"""Checks of the placements of parameters and buffers: whole heads, even shards, values instead of partial sums."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard, root_mesh
from vescale.errors import ParallelizeError, kind_of
from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex, StateTensor, enclosing
from vescale.ir._program import Place, Program, Wrap, part_sizes
from vescale.ir._resolve import PlannedPlacement, PlannedState, Resolution, shown_name
from vescale.ir._units import GatheredUnit, gathered_positions, join_placements, ragged_positions
from vescale.placements import InterleavedShard, normalize_placements, shard_dim
from vescale.plans import (
    AttentionEntry,
    CheckpointEntry,
    Entry,
    LocalEntry,
    MeshAxes,
    Plan,
    PrecisionEntry,
    RedistributeEntry,
    UnitEntry,
    config_value,
    placement_text,
)

# Which parameters may be cut into parts of unequal size while their module computes, and the sizes of the parts, also of
# inputs.


def refusal_of_uneven(
    state: StateTensor,
    dim: int,
    cuts: Sequence[Placement],
    resolution: Resolution,
    index: ModelIndex,
    *,
    is_gathered: bool,
) -> str | None:
    """Why ``dim`` of ``state`` must be cut evenly by ``cuts``, its placements on axes of more than one rank; None: it need
    not be. ``is_gathered``: its placements at rest are others.

    Ops on the rows of an embedding, and on rows and columns of a linear layer, and elementwise ops on what these make, need
    no equal sizes. Code that divides sizes does: views as heads, packed features, experts, whatever is in a local region.
    """
    path, _ = index.owner(state.names[0])
    owner, parent = index.modules[path], index.modules[index.module_names[path.rpartition(".")[0]]]
    is_linear = isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D"
    if any(around in resolution.locals for around in enclosing(path)):
        return "a local region computes with local sizes"
    if len(cuts) != 1 or type(cuts[0]) is not Shard:
        return "only one axis may shard a dim unevenly, in one piece per rank"
    if is_linear and is_attention(parent):
        return f"attention ({type(parent).__name__}) views these features as heads"
    if not (state.is_parameter and (is_linear or (isinstance(owner, nn.Embedding) and dim == 0))):
        kind = "a buffer" if not state.is_parameter else f"{kind_of(owner)}"
        return (
            f"rows of nn.Embedding, and rows and columns of nn.Linear, may be sharded unevenly, but not those of {kind}"
        )
    if dim > 0 and is_gathered:
        return "units gather parameters in one buffer, in which only the first dim may be sharded unevenly"
    return None


@dataclass(frozen=True)
class UnevenCut:
    """A dim of a parameter, buffer or input that the ranks of a mesh axis hold in parts of unequal size: ``sizes`` by rank.
    Where several axes cut it, ``axis`` has their names, and the position on the last one changes first."""

    name: str
    dim: int
    axis: str
    sizes: tuple[int, ...]


def uneven_cuts(program: Program, model: nn.Module) -> tuple[UnevenCut, ...]:
    """The dims that ``Shard`` cuts unevenly, as they are placed at rest."""
    found = []
    for instruction in program:
        if not isinstance(instruction.op, Place):
            continue
        tensor = getattr(model.get_submodule(instruction.path), instruction.target)
        name = f"{instruction.path}.{instruction.target}".removeprefix(".")
        for axis, placement in zip(program.axes, instruction.op.placements):
            if type(placement) is Shard and tensor.shape[placement.dim] % program.axes.size(axis):
                sizes = part_sizes(tensor.shape[placement.dim], program.axes.size(axis))
                found.append(UnevenCut(name, placement.dim, axis, sizes))
    return tuple(found)


def uneven_inputs(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> tuple[UnevenCut, ...]:
    """The dims of the model's ``inputs``, whole tensors by name, that ``Shard`` cuts unevenly."""
    entries = [i for i in program if i.path == "" and isinstance(i.op, Wrap) and i.op.given == "global"]
    names = list(inspect.signature(model.forward).parameters)
    by_name = {names[i.index] if isinstance(i.index, int) else i.index: i.op for i in entries}
    axes, found = program.axes, []
    for name, x in inputs.items():
        op = by_name.get(name, by_name.get(None))
        if not isinstance(x, torch.Tensor) or not isinstance(op, Wrap):
            continue
        for dim, size in enumerate(x.shape):
            cutting = [n for n, p in enumerate(op.placements) if type(p) is Shard and p.dim % max(x.ndim, 1) == dim]
            sizes = part_sizes(size, *(axes.sizes[n] for n in cutting))
            if len(set(sizes)) > 1:
                found.append(UnevenCut(f"<in:{name}>", dim, ",".join(axes.names[n] for n in cutting), sizes))
    return tuple(found)


# The positions of attention heads in the weights of a model, found by names and sizes alone.

# The projections of an attention module, by the usual names of the modules that hold them.
_QUERY = regex.compile(r"(?:w|to_|add_)?(?:q|query)(?:_proj|_b_proj|_lin|_linear)?")
_KEY_VALUE = regex.compile(r"(?:w|to_|add_)?(?:k|v|key|value)(?:_proj|_lin|_linear)?")
_OUTPUT = regex.compile(r"(?:w|to_|to_add_)?(?:o|out)(?:_proj|_lin|_linear)?|c_proj")

_NUM_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
_NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim", "dim_head")


@dataclass(frozen=True)
class Heads:
    """The heads along one dim of a weight: ``count`` of them, ``size`` rows (or columns) each, one after the other."""

    count: int
    size: int
    kind: str  # "query", "key/value"
    attribute: str  # the name of the number in the model or its config


def heads_of(index: ModelIndex, names: Sequence[str], shape: Sequence[int], dim: int) -> Heads | None:
    """The heads that a cut of ``dim`` of the parameter ``names`` (its first and tied names) would go through.

    None when the tensor is no projection of an attention module, when ``dim`` is not the one that runs over heads, or when
    the sizes do not show where heads begin.
    """
    path, attribute = index.owner(names[0])
    owner = index.modules[path]
    parent_path, _, own_name = path.rpartition(".")
    if own_name.isdecimal():  # a list of the projection and a dropout
        parent_path, _, own_name = parent_path.rpartition(".")
    parent = index.modules[index.module_names[parent_path]]
    if isinstance(owner, nn.MultiheadAttention):  # separate projections: q_proj_weight and so on
        parent, own_name = owner, attribute.removesuffix("_weight")
    names_of_number: tuple[str, ...]
    if _QUERY.fullmatch(own_name):
        names_of_number, kind, over_rows = _NUM_HEADS, "query", True
    elif _KEY_VALUE.fullmatch(own_name):
        names_of_number, kind, over_rows = (*_NUM_KEY_VALUE_HEADS, *_NUM_HEADS), "key/value", True
    elif _OUTPUT.fullmatch(own_name):
        names_of_number, kind, over_rows = _NUM_HEADS, "query", False
    else:
        return None
    if dim != _head_dim_of(owner, len(shape), over_rows):
        return None
    found = _number(parent, names_of_number)
    if found is None or not is_attention(parent):
        return None
    attribute, count = found
    if count < 1 or shape[dim] % count:
        return None
    size = shape[dim] // count
    head_dim = _number(parent, _HEAD_DIM)
    if head_dim is not None and head_dim[1] != size:  # heads of another make (latent attention, packed projections)
        return None
    return Heads(count, size, kind, attribute)


def _head_dim_of(owner: nn.Module, ndim: int, over_rows: bool) -> int | None:
    """The tensor dim that runs over heads: the output dim of q, k and v, the input dim of the output projection."""
    if ndim == 1:
        return 0 if over_rows else None  # a bias has the output dim only
    transposed = type(owner).__name__ == "Conv1D"  # transformers' Conv1D keeps (in, out)
    return 0 if over_rows != transposed else 1


def is_attention(module: nn.Module) -> bool:
    """A config is shared by the whole model, so that its numbers alone do not make a module an attention module."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or any(hasattr(module, number) for number in _NUM_HEADS)


def _number(module: nn.Module, names: Sequence[str]) -> tuple[str, int] | None:
    """The first of the attributes that the module, or else its config, has as an int."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    for holder in (module, config):
        for name in names:
            value = config_value(holder, name, layer)
            if isinstance(value, int) and not isinstance(value, bool):
                return name, value
    return None


def check_states(resolution: Resolution, index: ModelIndex, axes: MeshAxes, findings: Findings) -> None:
    """Errors in the placements of parameters and buffers.

    A cut that is there while the module computes must be even, except where no code relies on equal local sizes
    (:func:`refusal_of_uneven`). At rest any cut is fine.
    """
    for name, planned in resolution.states.items():
        state = index.states[name]
        if state.shape is None:
            continue
        _check_phases(planned, state, axes, findings)
        _check_partial(planned, state, findings)
        _check_annotated(planned, state, findings)
        running = {axis: choice for axis in axes if (choice := planned.running_at(axis))}
        _check_cuts(running, state, resolution, index, axes, findings)
        _check_ragged(planned, state, axes, findings)


def check_boundaries(resolution: Resolution, findings: Findings) -> None:
    """Errors in the placements of the model's inputs."""
    for (path, side, _), planned in resolution.boundaries.items():
        if path or side != "<in>":
            continue
        arriving = planned.src if planned.src else planned.dst
        for axis, choice in arriving.items().items():
            if isinstance(choice.placement, Partial):
                findings.error(
                    "partial",
                    f"'{choice.entry.path}' declares an input of the model as {placement_text(choice.placement)} on "
                    f"{axis}: a tensor that the caller passes holds values, not {_terms(choice.placement)}; use R, or "
                    "S(dim)",
                    choice.entry.source,
                )


def _terms(placement: Partial) -> str:
    """What each rank has of a pending value."""
    return {"sum": "summands", "avg": "terms of a mean"}.get(
        placement.reduce_op, f"candidates for a {placement.reduce_op}"
    )


def _check_phases(planned: PlannedState, state: StateTensor, axes: MeshAxes, findings: Findings) -> None:
    running = dict(zip(axes, planned.running(axes)))
    for axis, choice in planned.backward.items().items():
        forward = running[axis]
        if choice.placement != forward:
            findings.error(
                "phase",
                f"'{choice.entry.path}' places {{names}} as {placement_text(choice.placement)} on {axis} in the "
                f"backward and {placement_text(forward)} in the forward; a parameter has one placement during "
                "computation: write phase=run; for its gradient, name .grad",
                choice.entry.source,
                shown_name(state),
            )


def _check_partial(planned: PlannedState, state: StateTensor, findings: Findings) -> None:
    for role in (planned.init, planned.forward, planned.annotated):
        for axis, choice in role.items().items():
            if isinstance(choice.placement, Partial):
                findings.error(
                    "partial",
                    f"'{choice.entry.path}' makes {{names}} {placement_text(choice.placement)} on {axis}: parameters and "
                    f"buffers hold values, not {_terms(choice.placement)}; use R or S(dim); for a gradient, annotate "
                    "name.grad",
                    choice.entry.source,
                    shown_name(state),
                )
                return


def _check_annotated(planned: PlannedState, state: StateTensor, findings: Findings) -> None:
    for axis, choice in planned.annotated.items().items():
        placed = planned.init.get(axis) or planned.forward.get(axis)
        if placed is not None:
            findings.error(
                "conflict",
                f"{{names}} on axis {axis!r}: annotate '{choice.entry.path}' says that it already has this placement, "
                f"but shard '{placed.entry.path}' ({placed.entry.source}) places it; keep one of the two",
                choice.entry.source,
                shown_name(state),
            )


def _check_cuts(
    running: dict[str, PlannedPlacement],
    state: StateTensor,
    resolution: Resolution,
    index: ModelIndex,
    axes: MeshAxes,
    findings: Findings,
) -> None:
    """Each dim is cut into equal parts, and between heads, by all the axes that cut it together."""
    assert state.shape is not None
    by_dim: dict[int, list[tuple[str, PlannedPlacement]]] = {}
    for axis, choice in running.items():
        dim = shard_dim(choice.placement)
        if dim is not None:
            by_dim.setdefault(dim, []).append((axis, choice))
    for dim, cuts in by_dim.items():
        num_ranks = math.prod(axes.size(axis) for axis, _ in cuts)
        entry = cuts[-1][1].entry
        sizes = " x ".join(f"{axis}={axes.size(axis)}" for axis, _ in cuts)
        heads = heads_of(index, state.names, state.shape, dim)
        if (
            heads is not None
            and heads.count % num_ranks
            and not any(isinstance(choice.placement, InterleavedShard | StridedShard) for _, choice in cuts)
        ):
            _head_error(heads, num_ranks, sizes, cuts, state, entry, findings)
            continue
        pieces = math.prod(_pieces(choice.placement) for _, choice in cuts)
        if state.shape[dim] % (num_ranks * pieces):
            region = next(
                (path for path in enclosing(state.names[0].rpartition(".")[0]) if path in resolution.locals), None
            )
            if dim == 0 and region is not None and resolution.locals[region].kind == "experts":
                fewer = max(size for size in range(1, num_ranks) if state.shape[0] % size == 0)
                findings.error(
                    "divisible",
                    f"{{names}}: {state.shape[0]} experts over {num_ranks} ranks ({sizes}); every rank must have the "
                    f"same number: distribute them over a number of ranks that divides {state.shape[0]}, for example "
                    f"{fewer}",
                    entry.source,
                    shown_name(state),
                )
                continue
            wide = [choice.placement for axis, choice in cuts if axes.size(axis) > 1]
            planned = resolution.states[state.name]
            is_gathered = planned.init.complete(axes) != planned.running(axes)
            reason = refusal_of_uneven(state, dim, wide, resolution, index, is_gathered=is_gathered)
            if reason is None:
                continue
            fewer = max(n for n in range(1, num_ranks) if state.shape[dim] % (n * pieces) == 0 or n == 1)
            instead = (
                f"a number of ranks that divides it, for example {fewer}" if fewer > 1 else "a size that they divide"
            )
            parts = f"{num_ranks} ranks ({sizes})" + (f", {pieces} pieces each" if pieces > 1 else "")
            findings.error(
                "divisible",
                f"dim {dim} of {{names}} has size {state.shape[dim]}, which {parts} do not divide (shape {state.shape}, "
                f"{placement_text(cuts[-1][1].placement)}), and {reason}; use {instead}, or replicate it",
                entry.source,
                shown_name(state),
            )


def _head_error(
    heads: Heads,
    num_ranks: int,
    sizes: str,
    cuts: list[tuple[str, PlannedPlacement]],
    state: StateTensor,
    entry: Entry,
    findings: Findings,
) -> None:
    axis = cuts[-1][0]
    fewer = max(size for size in range(1, num_ranks + 1) if heads.count % size == 0)
    whole = "k and v" if heads.kind == "key/value" else "it"
    advice = f"replicate {whole} on {axis} ({{{axis}: R}})"
    if fewer > 1:
        advice += f", or use a number of ranks that divides {heads.count}, for example {fewer}"
    noun = "head" if heads.count == 1 else "heads"
    findings.error(
        "head",
        f"{{names}}: {heads.count} {heads.kind} {noun} of {heads.size} ({heads.attribute}={heads.count}) over "
        f"{sizes}: a shard boundary would fall inside an attention head; {advice}",
        entry.source,
        shown_name(state),
    )


def _check_ragged(planned: PlannedState, state: StateTensor, axes: MeshAxes, findings: Findings) -> None:
    """What the placements themselves refuse: several ragged axes, units that do not cover the tensor."""
    assert state.shape is not None
    resting, running = planned.init.complete(axes), planned.running(axes)
    joint = gathered_positions(resting, running)
    if state.is_parameter and not joint and len(ragged_positions(resting)) > 1:
        return  # told with the units
    for stage in dict.fromkeys((resting, running)):
        placements, sizes = join_placements(stage, axes.sizes, joint) if stage == resting else (stage, axes.sizes)
        try:
            normalize_placements(placements, state.shape, sizes)
        except ValueError as error:
            role = planned.init if stage == resting else planned.forward
            entries = [choice.entry for choice in role.items().values()] or [
                s.entry for s in planned.init.items().values()
            ]
            findings.error(
                "placement", f"{{names}}: {error}", entries[-1].source if entries else None, shown_name(state)
            )


def _pieces(placement: Placement) -> int:
    return placement.num_chunks if isinstance(placement, InterleavedShard) else 1


# Checks of hybrid sharding: replicas on the outer axis of a mesh must take part in the plan.

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
            f"{math.prod(plan.axes.size(axis) for axis in idle)} ranks would repeat the same work; for hybrid "
            "sharding, shard the batch over both: '<in:name>': "
            f"{{{', '.join(f'{axis}: S(0)' for axis in (idle[0], *first.shard))}}}",
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
        f"parameters are sharded over {_quoted(shard)} of a mesh with axes {own}, a slice of one with axes {names}: "
        f"the replicas along {_quoted(missing)} would never exchange gradients, and would diverge; write the plan for "
        f"mesh{list(wanted)} and shard the batch over {_quoted([*missing, *shard])} (hybrid sharding); to train "
        "separate models on purpose, create a separate mesh for each"
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
