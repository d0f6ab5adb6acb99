"""Multi-tensor kernels, which have underscores in their names and documentation under them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["foreach_copy_", "foreach_mul_", "foreach_norm", "has_foreach"]


def has_foreach(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the kernels take these tensors: dense ones of exactly ``torch.Tensor`` on a native device."""
    return (
        set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
        and {t.device.type for t in tensors} <= {"cpu", "cuda", "xpu"}
        and not any(t.is_sparse for t in tensors)
    )


def foreach_norm(tensors: Sequence[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The vector norm of each tensor, all of one dtype, accumulated and returned in ``dtype``. Kernels compute norms of
    complex tensors in the dtype of their parts."""
    wanted = None if tensors[0].is_complex() else dtype
    return list(torch._foreach_norm(list(tensors), order, dtype=wanted))


def foreach_mul_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(list(tensors), factor)


def foreach_copy_(tensors: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(tensors), list(sources))
