"""Strides of a whole tensor that a local tensor implies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["stride_like"]


def stride_like(local: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a whole tensor of ``shape`` whose dims have the same order in memory as those of ``local``.

    The result is the same on every rank, also where a rank holds one index of a dim: of two dims with equal strides, the
    one of local size 1 is the inner one.
    """
    order = sorted(range(len(shape)), key=lambda dim: (local.stride(dim), local.shape[dim] > 1, -dim))
    stride, step = [1] * len(shape), 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)
