"""Alignment: the placements that the operands of one elementwise computation are moved to, and those of its results."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec
from vescale.errors import OpPlacementError
from vescale.ops._call import Placements, names
from vescale.placements import has_custom, is_pending, move_local, ragged_axis, without_partials

# Ops whose results are sums (averages) of what each rank would compute from its own contribution, by name.
_ADDITIVE = names("add add_ sub sub_ copy_ _foreach_add _foreach_add_ _foreach_sub _foreach_sub_ _foreach_copy_")
_LINEAR_IN_FIRST = names("mul mul_ div div_ _foreach_mul _foreach_mul_ _foreach_div _foreach_div_")
_LINEAR_IN_SECOND = names("mul _foreach_mul")
_UNARY_LINEAR = names("neg neg_ _foreach_neg _foreach_neg_")
# Ops that any pending reduction passes through.
_TRANSPARENT = names("clone detach detach_ alias positive lift_fresh copy_ zero_ _foreach_copy_ _foreach_zero_")


class Alignment:
    """The placements of the operands and results of one elementwise computation.

    Attributes:
        leader: the placements of the results.
        inputs: the placements that each operand is moved to.
        prepare: what is done to operands of another shape than the results, see :class:`vescale.ops.Decision`.
        broadcasts: whether an operand with more than one element is broadcast.
    """

    def __init__(self, leader: Placements, operands: Sequence[DTensorSpec], shape: torch.Size) -> None:
        self.leader = leader
        self.is_ragged = ragged_axis(leader) is not None
        self.broadcasts = False
        self.inputs: tuple[Placements, ...] = ()
        self.prepare: tuple[tuple[int, Callable[[Any], Any]], ...] = ()
        for index, spec in enumerate(operands):
            self._place(index, spec, shape)

    def _place(self, index: int, spec: DTensorSpec, shape: torch.Size) -> None:
        if spec.shape == shape:
            self.inputs += (self.leader,)
            return
        self.inputs += (_replicated(spec),)
        if math.prod(spec.shape) == 1:
            if self.is_ragged and spec.ndim > 1:  # the local tensors that it meets are flat
                self.prepare += ((index, _as_vector),)
            return
        self.broadcasts = True
        if self.is_ragged:
            self.prepare += ((index, functools.partial(_expand_and_slice, spec.mesh, tuple(shape), self.leader)),)


def align(
    name: str,
    operands: Sequence[DTensorSpec],
    shape: torch.Size,
    mutated: Sequence[int],
    *,
    stock_may_lead: bool = False,
) -> Alignment | None:
    """The alignment of an elementwise op's operands; None when no operand can lead.

    The leader is the tensor that is written to, or the first operand with a custom placement that has the result's shape
    (with ``stock_may_lead`` the first with any placement).

    Raises RuntimeError when operands that are not single numbers are on different meshes.
    """
    same_shape = [index for index, spec in enumerate(operands) if spec.shape == shape]
    written = [index for index in same_shape if index in mutated]
    custom = [index for index in same_shape if has_custom(operands[index].placements)]
    leads = (written or custom or (same_shape if stock_may_lead else []))[:1]
    if not leads:
        return None
    if shape == () and len(operands) > 1 and not mutated and not stock_may_lead:
        return None  # one-element local tensors promote types unlike numbers
    leader = operands[leads[0]]
    for spec in operands:
        if spec.mesh != leader.mesh and math.prod(spec.shape) != 1:
            raise OpPlacementError(
                f"{name}: operands of shapes {tuple(leader.shape)} and {tuple(spec.shape)} are on different meshes "
                f"{leader.mesh} and {spec.mesh}; move them to one mesh by full_tensor() and distribute_tensor()"
            )
    target = tuple(
        placement
        if not _pending_on(axis, operands, shape)
        else _settle(name, axis, operands, shape, leads[0], bool(written))
        for axis, placement in enumerate(leader.placements)
    )
    alignment = Alignment(target, operands, shape)
    alignment.inputs = tuple(
        _keep_pending(name, index, spec, wanted, target, shape)
        for index, (spec, wanted) in enumerate(zip(operands, alignment.inputs))
    )
    return alignment


def _pending_on(axis: int, operands: Sequence[DTensorSpec], shape: torch.Size) -> bool:
    return any(
        spec.shape == shape and axis < spec.mesh.ndim and spec.placements[axis].is_partial() for spec in operands
    )


def _settle(
    name: str, axis: int, operands: Sequence[DTensorSpec], shape: torch.Size, leader: int, is_written: bool
) -> Placement:
    """The results' placement on an axis where an operand is Partial: that Partial if the op is linear in the operand, else
    Replicate (or the leader's own placement)."""
    found = [spec.placements[axis] if spec.shape == shape else Replicate() for spec in operands]
    own = found[leader]
    partials = [placement for placement in found if placement.is_partial()]
    first = partials[0]
    passes = False
    if is_pending(first, "sum", "avg"):
        if name in _ADDITIVE:  # with one operand, the other is a Python number: not to be added on every rank
            passes = len(found) > 1 and all(
                placement == first or _is_summand(first, placement, spec, shape)
                for placement, spec in zip(found, operands)
            )
            passes = passes and (own == first or not is_written)
        elif len(partials) == 1 and (name in _LINEAR_IN_FIRST or name in _LINEAR_IN_SECOND):
            passes = found.index(first) == 0 or name in _LINEAR_IN_SECOND
            passes = passes and all(p == first or p.is_replicate() for p in found)
        elif name in _UNARY_LINEAR:
            passes = True
    if name in _TRANSPARENT:
        passes = all(placement == first for placement in found)
    if passes:
        return first
    return Replicate() if own.is_partial() else own


def _is_summand(pending: Placement, own: Placement, spec: DTensorSpec, shape: torch.Size) -> bool:
    """Whether an operand can be one more contribution to a pending sum: a replicated one becomes that of the first rank."""
    return is_pending(pending, "sum") and own.is_replicate() and spec.shape == shape


def _keep_pending(
    name: str, index: int, spec: DTensorSpec, wanted: Placements, target: Placements, shape: torch.Size
) -> Placements:
    """A factor of a pending sum is not pending itself: it stays Replicate where the product is Partial."""
    if name not in _LINEAR_IN_FIRST or spec.shape != shape:
        return wanted
    return tuple(
        Replicate() if result.is_partial() and not own.is_partial() else placement
        for placement, result, own in zip(wanted, target, spec.placements)
    )


def _replicated(spec: DTensorSpec) -> Placements:
    return (Replicate(),) * spec.mesh.ndim


def _as_vector(local: torch.Tensor) -> torch.Tensor:
    return local.reshape(1)


def _expand_and_slice(
    mesh: DeviceMesh, shape: tuple[int, ...], placements: Placements, whole: torch.Tensor
) -> torch.Tensor:
    """This rank's part of a replicated tensor that is broadcast to ``shape``; nothing is communicated."""
    return move_local(whole.expand(shape), mesh, shape, [Replicate()] * mesh.ndim, without_partials(placements)).wait()
