"""The steps of a change of placements: which axes are reduced in which order, and what is exchanged afterwards. Pure.

Python (``_local_redistribution.py``) and C++ (``_native_moves.py``) run the same steps, with the same collectives: one
rank may observe them, and therefore run them in Python, while its peers do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Partial, Placement

from vescale.errors import RedistributeError
from vescale.placements._exchange_plan import exchange_axes
from vescale.placements._placement_kinds import is_sharded, ragged_axis, shard_dim
from vescale.placements._ragged import RaggedShard
from vescale.placements._region import largest_shape

__all__ = ["Step", "check_partials", "contribution_factors", "exchanged_axes", "move_steps", "neutral_value"]

Placements = tuple[Placement, ...]
Kind = Literal["own reduction", "clone", "all-reduce", "reduce-scatter", "exchange"]
_REDUCE_OPS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Step:
    """One step, from placements to placements.

    Attributes:
        kind: ``own reduction``: the placement knows how to reduce itself; ``clone``: nothing to reduce, but new memory;
            ``exchange``: everything but reductions.
        axis: the mesh axis that is reduced; -1 for an exchange.
    """

    kind: Kind
    before: Placements
    after: Placements
    axis: int = -1


def move_steps(
    shape: Sequence[int], mesh_shape: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]
) -> tuple[Step, ...]:
    """The steps from ``source`` to ``target``; none if they are equal. Not cached: a masked partial holds a tensor."""
    shape, mesh_shape, source, target = tuple(shape), tuple(mesh_shape), tuple(source), tuple(target)
    steps: list[Step] = []
    held = source
    for axis in _reduction_order(source, target):
        kind, becomes = _reduction(shape, mesh_shape, held, target, axis)
        after = (*held[:axis], becomes, *held[axis + 1 :])
        steps.append(Step(kind, held, after, axis))
        held = after
    if held != target:
        steps.append(Step("exchange", held, target))
    return tuple(steps)


def _reduction_order(source: Placements, target: Placements) -> list[int]:
    """The Partial axes to reduce: reduce-scatters first, so that the others reduce less, a ragged one last of them."""
    axes = [a for a, (s, t) in enumerate(zip(source, target)) if s.is_partial() and s != t]
    return sorted(axes, key=lambda a: (not is_sharded(target[a]), isinstance(target[a], RaggedShard)))


def _reduction(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axis: int
) -> tuple[Kind, Placement]:
    """How one Partial axis is reduced, and what the result has there."""
    partial = source[axis]
    if type(partial) is not Partial or partial.reduce_op not in _REDUCE_OPS:
        return "own reduction", Replicate()  # masked or norm partials
    if mesh_shape[axis] == 1:
        return "clone", Replicate()
    scattered = _scattered(shape, mesh_shape, source, target, axis)
    return ("all-reduce", Replicate()) if scattered is None else ("reduce-scatter", scattered)


def _scattered(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], source: Placements, target: Placements, axis: int
) -> Placement | None:
    """The placement that a reduce-scatter on a Partial axis can leave there, or None when it must be an all-reduce.

    A rank's part of the result must be within what it holds now: a ragged cut comes last, so it always does; a
    shard-like one does unless a later axis cuts the same dim. Where the target's own cut does not, a balanced ragged
    one stands in, and the exchange that follows does the rest.
    """
    wanted = target[axis]
    others = [p for a, p in enumerate(source) if a != axis]
    if not is_sharded(wanted) or ragged_axis(others) is not None:
        return None
    if isinstance(wanted, RaggedShard):
        wanted_others = [p for a, p in enumerate(target) if a != axis]
        fits = all(s == t or (s.is_partial() and t.is_replicate()) for s, t in zip(others, wanted_others))
    else:
        fits = all(shard_dim(later) != shard_dim(wanted) for later in source[axis + 1 :])
    if fits:
        return wanted
    held = largest_shape(shape, source, mesh_shape)
    inner = [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0]
    return RaggedShard().resolve(held, mesh_shape[axis], inner)


def check_partials(source: Sequence[Placement], target: Sequence[Placement], dtype: torch.dtype) -> None:
    """Refuse what has no meaning, before any communication."""
    for axis, (before, after) in enumerate(zip(source, target)):
        if before == after:
            continue
        for partial in (before, after):
            if type(partial) is not Partial:
                continue
            inexact = partial.reduce_op == "avg" and not (dtype.is_floating_point or dtype.is_complex)
            if inexact or (partial.reduce_op in ("max", "min") and dtype.is_complex):
                raise RedistributeError(
                    f"cannot redistribute {before} to {after} on mesh axis {axis}: {partial.reduce_op} of {dtype} values "
                    "is not defined; convert the tensor to a floating-point dtype first"
                )
        if not after.is_partial():
            continue
        if before.is_partial():
            raise RedistributeError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: pending reductions with different "
                "operations have no common meaning; redistribute to Replicate() first"
            )
        if type(after) is not Partial or after.reduce_op not in ("sum", "avg", "max", "min"):
            raise RedistributeError(
                f"cannot redistribute {before} to {after} on mesh axis {axis}: no contribution of each rank is defined "
                "for it; use Partial with sum, avg, max or min"
            )


def exchanged_axes(step: Step, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    """The axes over which an exchange communicates."""
    return tuple(axis for axis in exchange_axes(step.before, step.after) if mesh_shape[axis] > 1)


def _becoming_partial(step: Step) -> list[tuple[int, Partial]]:
    changed = enumerate(zip(step.before, step.after))
    return [(axis, after) for axis, (before, after) in changed if isinstance(after, Partial) and before != after]


def neutral_value(step: Step, dtype: torch.dtype) -> float | int | None:
    """What an exchange fills the new local tensor with first: the value that does not change the reduction into which
    sharded data is embedded. None: it writes all elements."""
    ops = [partial.reduce_op for axis, partial in _becoming_partial(step) if is_sharded(step.before[axis])]
    if not ops:
        return None
    if ops[0] in ("sum", "avg"):
        return 0
    if dtype == torch.bool:
        return int(ops[0] == "min")
    if dtype.is_floating_point:
        return float("-inf") if ops[0] == "max" else float("inf")
    return torch.iinfo(dtype).min if ops[0] == "max" else torch.iinfo(dtype).max


def contribution_factors(step: Step, mesh_shape: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
    """What turns values into this rank's contribution to the reductions that become pending; 0 sets everything to zero."""
    factors = []
    for axis, partial in _becoming_partial(step):
        if partial.reduce_op == "avg" and is_sharded(step.before[axis]):
            factors.append(mesh_shape[axis])
        if partial.reduce_op == "sum" and not is_sharded(step.before[axis]) and coordinate[axis] != 0:
            factors.append(0)
    return tuple(factors)
