"""What a parameter's ``grad`` is: complete, or one rank's contribution; and how one is added to another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import AsyncCollectiveTensor, DTensorSpec, make_dtensor, make_spec, own_part, spec_of
from vescale.placements import contiguous_stride, own_region, redistribute

_COMPLETE = "_vescale_complete"


def mark_complete(gradient: torch.Tensor) -> None:
    """From now on what autograd accumulates on top of it is reduced separately."""
    setattr(gradient, _COMPLETE, True)


def is_marked_complete(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _COMPLETE, False)


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient, detached, and waited for if it is the result of an asynchronous collective."""
    local = own_part(gradient)
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return local.detach() if local.requires_grad else local


def added(before: torch.Tensor | None, local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """The gradient of which ``local`` is this rank's part, placed as ``spec`` (None: plain), added to the one from before,
    if there is one, in that one's memory. Communicates if that one is placed otherwise."""
    if before is None:
        return local if spec is None else make_dtensor(local, spec)
    if spec is not None and isinstance(before, DTensor) and tuple(before.placements) != tuple(spec.placements):
        before = redistribute(before, spec.mesh, spec.placements)
    local_part(before).add_(local)
    return before


def add_contribution(local: torch.Tensor, spec: DTensorSpec, reduced: DTensor) -> bool:
    """Add a reduced gradient to ``local``, this rank's contribution to one that is placed as ``spec``, so that the reduction
    gives the sum of both. False, and nothing is added, where they are placed differently on an axis along which ``spec`` is
    not pending. No communication."""
    scale = 1.0
    for axis, (to, of) in enumerate(zip(spec.placements, reduced.placements, strict=True)):
        if to == of:
            continue
        if not to.is_partial() or of.is_partial():
            return False
        # Each rank along the axis adds its part, or all of them add the same.
        size = spec.mesh.size(axis)
        scale *= (1 if of.is_replicate() else size) if to.is_partial("avg") else (1 / size if of.is_replicate() else 1)
    whole, own = (own_region(spec.shape, each, spec.mesh) for each in (spec.placements, tuple(reduced.placements)))
    assert whole is not None
    assert own is not None
    with torch.no_grad():
        part = local_part(reduced).to(local.device)
        for source, target in itertools.product(own.boxes, whole.boxes):
            common = source.intersect(target)
            if common is not None:
                common[1].view(local).add_(common[0].view(part), alpha=scale)
    return True


def gradient_spec(parameter: DTensor, placements: Sequence[Placement], dtype: torch.dtype) -> DTensorSpec:
    """The row-major spec of a gradient; the parameter's own object if it is equal: an optimizer's ops then find equal specs
    by identity."""
    own, shape = spec_of(parameter), tuple(parameter.shape)
    spec = make_spec(own.mesh, placements, shape, contiguous_stride(shape), dtype)
    return own if own == spec else spec
