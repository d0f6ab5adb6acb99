"""How a reduced buffer tells which gradients no rank has contributed to, without a byte more.

Such a gradient must be None, as on one device, not zeros. So a slot without contribution is filled with an element that
changes no reduction, and that a contribution never begins with: of a sum -0.0, because only a sum of nothing but -0.0 is
-0.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["clear_signs", "is_untouched", "neutral"]


def neutral(op: str) -> float:
    """What a slot without contribution is filled with."""
    return {"sum": -0.0, "product": 1.0, "max": -math.inf, "min": math.inf}[op]


def is_untouched(mark: torch.Tensor, op: str) -> torch.Tensor:
    """Whether a slot's first element shows that no rank contributed; a 0-dim bool tensor."""
    value = mark.real if mark.is_complex() else mark
    filled = neutral(op)
    return (value == filled) & torch.signbit(value) if op == "sum" else value == filled


def clear_signs(flat: torch.Tensor, marks: Sequence[int] | torch.Tensor) -> None:
    """Make -0.0 at ``marks`` 0.0, so that none of these looks like a slot without contribution."""
    where = torch.as_tensor(marks, dtype=torch.int64, device=flat.device)
    flat.index_add_(0, where, flat.new_zeros(len(where)))
