"""The patches of what PyTorch computes of all gradients, for models of which each rank has a part of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad

from vescale.compat.patching import Changes

__all__ = ["OverStages", "share_overflows", "take_norms"]


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
