"""What ``torch.amp.GradScaler`` asks of gradients that are DTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from vescale.compat.dispatch import HANDLERS, handlers_of_dtensor
from vescale.compat.dtensor import local_of, make_dtensor, make_spec
from vescale.compat.patching import Changes


def take_over_unscaling(changes: Changes, _: Any) -> None:
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    changes.entry(handlers_of_dtensor, op, unscale, HANDLERS)


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``GradScaler.unscale_``: whether any gradient has an inf or a nan on any rank. PyTorch's reduces over the axes along
    which the first gradient of the list is cut, so that ranks may skip different steps."""
    grads, found_inf, inv_scale = args
    found = _plain(found_inf)
    op([_plain(x) for x in grads], found, _plain(inv_scale), **kwargs)
    cut: dict[Any, set[int]] = {}
    for x in grads:
        if isinstance(x, DTensor):
            axes = cut.setdefault(x.device_mesh, set())
            axes.update(axis for axis, placement in enumerate(x.placements) if not placement.is_replicate())
    for mesh, axes in cut.items():
        placements = [Partial("max") if axis in axes else Replicate() for axis in range(mesh.ndim)]
        spec = make_spec(mesh, placements, found.shape, found.stride(), found.dtype)
        if axes:
            found.copy_(make_dtensor(found.clone(), spec).full_tensor())


def _plain(x: torch.Tensor) -> torch.Tensor:
    return local_of(x) if isinstance(x, DTensor) else x
