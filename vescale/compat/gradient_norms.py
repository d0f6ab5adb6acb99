"""The patch of PyTorch's norm of gradients, for models of which each rank has a part of the parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad

from vescale.compat.patching import Changes

__all__ = ["StageNorms", "take_norms_over_stages"]


class StageNorms(Protocol):
    """What runs in place of PyTorch's norm."""

    def concern(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether other ranks have gradients of the same model that this rank has no part of."""

    total_norm: Callable[..., torch.Tensor]


def take_norms_over_stages(changes: Changes, hooks: StageNorms) -> None:
    """``clip_grad_norm_`` calls this function, whoever has imported it before."""
    original = clip_grad._get_total_norm

    @functools.wraps(original)
    def _get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return (hooks.total_norm if hooks.concern(listed) else original)(listed, *args, **kwargs)

    changes.function(original, _get_total_norm)
