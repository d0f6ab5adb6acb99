"""A mark on gradients that are complete: what autograd accumulates on top of them is reduced separately."""

from __future__ import annotations

import torch

__all__ = ["is_marked_complete", "mark_complete"]

_NAME = "_vescale_complete"


def mark_complete(gradient: torch.Tensor) -> None:
    setattr(gradient, _NAME, True)


def is_marked_complete(gradient: torch.Tensor) -> bool:
    return getattr(gradient, _NAME, False)
