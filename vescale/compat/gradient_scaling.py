"""What PyTorch computes of all gradients of a model, where each rank has a part of them: overflows of DTensors, and norms,
overflows and lists of parameters over the stages of a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import clip_grad

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


class OverStages(Protocol):
    """What runs in place of PyTorch's norm, and after its search for inf."""

    def concern(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether other ranks have gradients of the same model that this rank has no part of."""

    total_norm: Callable[..., torch.Tensor]

    def share_overflow(self, parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        """Set ``flags``, which are 1 where this rank's gradients overflow, to 1 if those of any stage do. Returns whether a
        parameter is one of a model in stages."""


def take_norms(changes: Changes, hooks: OverStages) -> None:
    """``clip_grad_norm_`` calls this function, whoever has imported it before."""
    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return (hooks.total_norm if hooks.concern(listed) else original)(listed, *args, **kwargs)

    changes.function(original, _get_total_norm)


def share_overflows(changes: Changes, hooks: OverStages) -> None:
    """``step`` and ``unscale_`` of ``GradScaler`` call this method, for optimizers that scale by themselves, too."""
    original = GradScaler._unscale_grads_

    @functools.wraps(original)
    def _unscale_grads_(
        self: GradScaler, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        flags = found or {found_inf.device: found_inf}  # a stage without gradients has no flags
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return flags if hooks.share_overflow(parameters, list(flags.values())) else found

    changes.attribute(GradScaler, "_unscale_grads_", _unscale_grads_)


def take_no_parameters(changes: Changes, hooks: OverStages) -> None:
    """What requires gradients of a model may all be in other stages; a list of it is empty then, on some ranks alone."""
    original: Any = torch.optim.Optimizer.__init__

    @functools.wraps(original)
    def __init__(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params)
            if not params and hooks.concern([]):
                params = [{"params": []}]
        original(self, params, defaults)

    changes.attribute(torch.optim.Optimizer, "__init__", __init__)
