"""Attention of a GPU, on a host whose kernels do not take the same calls."""

from __future__ import annotations

import contextlib

import torch

from vescale.compat.attention_kernels import attention_by, host_has_attention_kernel
from vescale.errors import UnsupportedRandomOpError

__all__ = ["attention_of_gpu"]

_aten = torch.ops.aten


def attention_of_gpu() -> contextlib.AbstractContextManager[None]:
    """Inside, where the host would multiply queries and keys as matrices (values with fewer numbers than keys), the operator
    of a GPU's kernel runs, which keeps one number for each query and head. It must run without values."""
    return attention_by(_attend)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if not query.ndim == key.ndim == value.ndim == 4 or query.is_meta:
        return None
    try:
        if host_has_attention_kernel(query, key, value, attn_mask, dropout_p, is_causal, **options):
            return None
    except UnsupportedRandomOpError:  # a part of one device's dropout is drawn, which kernels cannot
        return None
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    mask = attn_mask
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
        mask = mask.expand(*query.shape[:3], key.shape[2])
    found = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )
    attended: torch.Tensor = found[0]
    return attended
