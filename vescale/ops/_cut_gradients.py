"""Gradients that arrive whole on every rank, where the tensor is cut: that of ``x.sum()`` is one number, expanded."""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import unserializable_hook

from vescale.compat import spec_of
from vescale.ops._conversion import convert

__all__ = ["with_cut_gradient"]


def with_cut_gradient(x: DTensor) -> DTensor:
    """An output of a model, whose gradient is cut as ``x`` is where it arrives whole. Each rank then computes with its own
    part, without communication."""
    placements = spec_of(x).placements
    if x.requires_grad and _is_computed(x) and any(not (p.is_replicate() or p.is_partial()) for p in placements):
        x.register_hook(functools.partial(_cut, placements))
    return x


def _is_computed(x: DTensor) -> bool:
    try:
        return not x.is_leaf
    except RuntimeError:  # a view that autograd refuses to use since its base was written to; it may be returned
        return False


@unserializable_hook
def _cut(placements: tuple[Placement, ...], grad: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(grad, DTensor):
        return None
    arrived = spec_of(grad).placements
    target = [p if g.is_replicate() and not p.is_partial() else None for p, g in zip(placements, arrived)]
    return convert(grad, target, requester="gradient") if any(p is not None for p in target) else None
