"""Replicated gradients of sharded tensors, such as that of ``x.sum()``: one number, expanded to the shape of ``x``."""

from __future__ import annotations

import functools

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import unserializable_hook

from vescale.compat import is_computed, spec_of
from vescale.ops._conversion import convert


def with_cut_gradient(x: DTensor) -> DTensor:
    """Return ``x``, an output of a model, with a hook that shards its gradient like ``x`` on each axis where the gradient is
    Replicate. The backward then runs on local shards. The hook does not communicate."""
    placements = spec_of(x).placements
    if x.requires_grad and is_computed(x) and any(not (p.is_replicate() or p.is_partial()) for p in placements):
        x.register_hook(functools.partial(_cut, placements))
    return x


@unserializable_hook
def _cut(placements: tuple[Placement, ...], grad: torch.Tensor) -> torch.Tensor | None:
    if not isinstance(grad, DTensor):
        return None
    arrived = spec_of(grad).placements
    target = [p if g.is_replicate() and not p.is_partial() else None for p, g in zip(placements, arrived)]
    return convert(grad, target, requester="gradient") if any(p is not None for p in target) else None
