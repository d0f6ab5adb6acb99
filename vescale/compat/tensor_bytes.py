"""The elements of a tensor as bytes, which compare and copy whatever the dtype."""

from __future__ import annotations

import torch

__all__ = ["bytes_of"]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of the elements in row-major order, flat: in the tensor's memory if it is contiguous, else of a copy.

    A tensor of one element counts as contiguous whatever its strides, and ``view(torch.uint8)`` refuses all but 1.
    """
    flat = tensor.detach().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
