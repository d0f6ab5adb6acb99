"""Averages as divided sums: before the reduction where that is exact, else after it."""

from __future__ import annotations

import torch

from vescale.gradients._reduction import Reduction

__all__ = ["copy_scaled", "divide_", "is_exact_before_sum"]


def copy_scaled(target: torch.Tensor, source: torch.Tensor, scale: float) -> None:
    """Copy ``source``, multiplied by ``scale``, to ``target``, which may be the same memory."""
    if target.dtype == source.dtype and target.data_ptr() != source.data_ptr() and scale != 1:
        torch.mul(source, scale, out=target)
        return
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
    if scale != 1:
        target.mul_(scale)


def divide_(numbers: torch.Tensor, divisor: int) -> None:
    """In place. Complex numbers are divided as pairs of real ones, because complex division turns -0.0 into 0.0."""
    if numbers.is_complex():
        numbers = torch.view_as_real(numbers)
    if _is_power_of_two(divisor):  # as exact as a division, and faster
        numbers.mul_(1 / divisor)
    else:
        numbers.div_(divisor)


def is_exact_before_sum(reduction: Reduction) -> bool:
    """Whether contributions may be divided before the sum: by a power of two, in a dtype with a wide range of exponents."""
    return reduction.divisor > 1 and _is_power_of_two(reduction.divisor) and reduction.reduce_dtype != torch.float16


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
