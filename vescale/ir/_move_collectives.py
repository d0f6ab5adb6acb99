"""Collectives that a tensor's moves between placements cause: at a boundary, and of a parameter while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import gathered_size
from vescale.ir._placement_flow import AxisPlacement
from vescale.ir._uneven_cuts import part_sizes
from vescale.plans import MeshAxes

__all__ = ["Collective", "Move", "When", "move_collectives"]

When = Literal["forward", "backward"]


@dataclass(frozen=True)
class Collective:
    """One predicted collective of one step.

    Attributes:
        path: the module, or the parameter's name.
        target: ``<in>``, ``<in:name>``, ``<out>``, ``weight`` (a gather) or ``weight.grad`` (a gradient's reduction);
            ``<unit>`` and ``<unit>.grad`` of the parameters of a unit together; ``<experts>``, and ``<attention>`` of a
            sequence that is cut and ``<statistics>`` of a batch that is, of what a region or a call does inside.
        op: None where a collective depends on what is unknown until run.
        num_bytes: bytes that each rank sends or receives from others, as the communication ledger counts (where it is not
            the same on all, those of the busiest); None: unknown.
    """

    path: str
    target: str
    when: When
    axis: str
    op: str | None
    num_bytes: int | None


@dataclass
class _Uses:
    """How the gradient of a replicated tensor comes back on one axis, by what its copies were used for."""

    partial: bool = False
    unknown: bool = False


@dataclass
class Move:
    """A boundary crossing on one axis, or a parameter while it runs."""

    path: str
    target: str
    axis: str
    src: AxisPlacement
    dst: AxisPlacement
    num_bytes: int | None  # of the whole tensor along this axis: what all ranks of the axis hold together
    is_parameter: bool
    has_gradient: bool
    shape: tuple[int, ...] = ()  # of a boundary's tensor
    uses: _Uses = field(default_factory=_Uses)


def move_collectives(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    """The collectives of one move, forward and backward."""
    yield from _of_parameter(move, axes) if move.is_parameter else _of_boundary(move, axes)


def _of_parameter(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    attribute = move.path.rpartition(".")[2]
    path = move.path.rpartition(".")[0]
    if move.src != move.dst:
        yield from _collective(path, attribute, "forward", move, _op(move.src, move.dst), axes)
    if not move.has_gradient or not isinstance(move.dst, Replicate):
        return
    op = "all_reduce" if isinstance(move.src, Replicate) else "reduce_scatter"
    if move.uses.partial:
        yield from _collective(path, f"{attribute}.grad", "backward", move, op, axes)
    elif move.uses.unknown:
        yield Collective(path, f"{attribute}.grad", "backward", move.axis, None, None)


def _of_boundary(move: Move, axes: MeshAxes) -> Iterator[Collective]:
    if move.src is None:
        yield Collective(move.path, move.target, "forward", move.axis, None, None)
        if move.has_gradient:
            yield Collective(move.path, move.target, "backward", move.axis, None, None)
        return
    yield from _crossing("forward", move, move.src, move.dst, axes)
    if not move.has_gradient:
        return
    # The boundary rule: a gradient goes back as the tensor came, whole where it came as a sum.
    back: Placement = Replicate() if isinstance(move.src, Partial) else move.src
    if not isinstance(move.dst, Replicate | Partial):
        yield from _crossing("backward", move, move.dst, back, axes)
    elif move.uses.partial:
        yield from _crossing("backward", move, Partial(), back, axes)
    elif move.uses.unknown:
        yield Collective(move.path, move.target, "backward", move.axis, None, None)


def _crossing(when: When, move: Move, src: AxisPlacement, dst: AxisPlacement, axes: MeshAxes) -> Iterator[Collective]:
    """Of a boundary's tensor, or its gradient, from ``src`` to ``dst``."""
    ranks = axes.size(move.axis)
    cuts = [move.shape[p.dim] for p in (src, dst) if type(p) is Shard]
    for found in _collective(move.path, move.target, when, move, _op(src, dst), axes):
        if move.num_bytes is None or all(size % ranks == 0 for size in cuts):
            yield found
        else:
            yield replace(found, num_bytes=move.num_bytes // math.prod(cuts) * _busiest(found.op, cuts, ranks))


def _busiest(op: str | None, cuts: Sequence[int], ranks: int) -> int:
    """How many elements the busiest rank receives, or sends in a reduce-scatter, of a tensor that has the dims ``cuts``
    only: the one that is put together or taken apart, or both in this order."""
    parts = [part_sizes(size, ranks) for size in cuts]
    if op == "all_to_all":
        return max((cuts[0] - before) * after for before, after in zip(*parts, strict=True))
    if op == "all_gather" and gathered_size(parts[0]) is not None:
        return (ranks - 1) * max(parts[0])
    return cuts[0] - min(parts[0])


def _op(src: AxisPlacement, dst: AxisPlacement) -> str | None:
    """The collective that brings ``src`` to ``dst``; ``""`` for none, None where that is unknown."""
    if src is None or dst is None:
        return None
    if src == dst or isinstance(src, Replicate) or isinstance(dst, Partial):
        return ""
    if isinstance(src, Partial):
        return "all_reduce" if isinstance(dst, Replicate) else "reduce_scatter"
    return "all_gather" if isinstance(dst, Replicate) else "all_to_all"


def _collective(path: str, target: str, when: When, move: Move, op: str | None, axes: MeshAxes) -> Iterator[Collective]:
    if op == "":
        return
    size = axes.size(move.axis)
    moved = None
    if op is not None and move.num_bytes is not None:
        moved = move.num_bytes * (size - 1) // size
        moved = {"all_reduce": 2 * moved, "all_to_all": moved // size}.get(op, moved)
    yield Collective(path, target, when, move.axis, op, moved)
