"""Strides of whole tensors: contiguous ones, and those that a local tensor implies."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of ``shape``, as PyTorch computes them (a dim of size 0 counts as 1)."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


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
