"""Marks of gradients in a reduced bucket that no rank has contributed to.

A gradient without contributions must be None, as on one device, and not zeros. A slot without a contribution is therefore
filled with an element that changes no reduction and that no contribution starts with. For a sum this is -0.0, because a sum
is -0.0 only if every summand is. A slot that is empty on this rank has one extra element for this purpose, because all ranks
must agree on whether a parameter has a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def neutral(op: str) -> float:
    """The element that a slot without a contribution is filled with."""
    return {"sum": -0.0, "product": 1.0, "max": -math.inf, "min": math.inf}[op]


def is_unused(mark: torch.Tensor, op: str) -> torch.Tensor:
    """Whether a slot's first element shows that no rank contributed; a bool tensor in the shape of ``mark``."""
    value = mark.real if mark.is_complex() else mark
    filled = neutral(op)
    return (value == filled) & torch.signbit(value) if op == "sum" else value == filled


def clear_signs(flat: torch.Tensor, marks: Sequence[int]) -> None:
    """Replace -0.0 at the indices ``marks`` by 0.0, so that none of these slots looks unused."""
    where = torch.tensor(marks, dtype=torch.int64, device=flat.device)
    flat.index_add_(0, where, flat.new_zeros(len(where)))
