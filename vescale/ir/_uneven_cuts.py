"""Which parameters may be cut into parts of unequal size while their module computes, and the sizes of the parts, also of
inputs."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import kind_of
from vescale.ir._attention_heads import is_attention
from vescale.ir._model_index import ModelIndex, StateTensor, enclosing
from vescale.ir._operations import Place, Wrap
from vescale.ir._program import Program
from vescale.ir._resolve import Resolution
from vescale.placements import local_region


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
        return "only one axis may cut a dim unevenly, in one piece a rank"
    if is_linear and is_attention(parent):
        return f"attention ({type(parent).__name__}) views these features as heads"
    if not (state.is_parameter and (is_linear or (isinstance(owner, nn.Embedding) and dim == 0))):
        kind = "a buffer" if not state.is_parameter else f"{kind_of(owner)}"
        return f"rows of nn.Embedding, and rows and columns of nn.Linear, may be uneven, not those of {kind}"
    if dim > 0 and is_gathered:
        return "what rests elsewhere is gathered in one buffer, in which dims but the first are cut evenly"
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


def part_sizes(size: int, *num_ranks: int) -> tuple[int, ...]:
    """Of a dim that ``Shard`` cuts along axes with ``num_ranks``: what each rank has."""
    cuts = (Shard(0),) * len(num_ranks)
    coordinates = itertools.product(*map(range, num_ranks))
    return tuple(local_region((size,), cuts, num_ranks, at).local_shape[0] for at in coordinates)
