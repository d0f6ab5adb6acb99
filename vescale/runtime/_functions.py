"""Torch functions with a rule of their own inside a parallelized model's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from vescale.runtime._attention import attention
from vescale.runtime._batch_norm import batch_norm
from vescale.runtime._concat import concat
from vescale.runtime._embedding import embedding
from vescale.runtime._escapes import escape
from vescale.runtime._indexing import index_item
from vescale.runtime._norm import NORMALIZATIONS, normalization
from vescale.runtime._pooling import POOLINGS, pooled
from vescale.runtime._rows import PACKING, RECURRENT, embedding_bag, packed, recurrent
from vescale.runtime._smoothed_loss import cross_entropy
from vescale.runtime._splitting import SPLITS, split
from vescale.runtime._statistics import (
    ADDITIONS,
    NONLINEAR,
    OFFSETS,
    PRODUCTS,
    QUOTIENTS,
    addition,
    mean,
    nonlinear,
    offset,
    product,
    quotient,
    total,
)

__all__ = ["FUNCTIONS"]

# function -> rule(runtime, function, args, kwargs); called when an argument is a DTensor, with plain tensors made global.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: attention,
    F.batch_norm: batch_norm,
    F.cross_entropy: cross_entropy,
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.embedding: embedding,
    **dict.fromkeys(PACKING, packed),
    **dict.fromkeys(POOLINGS, pooled),
    **dict.fromkeys(RECURRENT, recurrent),
    **dict.fromkeys(SPLITS, split),
    **dict.fromkeys(NORMALIZATIONS, normalization),
    **dict.fromkeys(ADDITIONS, addition),
    **dict.fromkeys(NONLINEAR, nonlinear),
    torch.mean: mean,
    torch.Tensor.mean: mean,
    torch.sum: total,
    torch.Tensor.sum: total,
    **dict.fromkeys(OFFSETS, offset),
    **dict.fromkeys(PRODUCTS, product),
    **dict.fromkeys(QUOTIENTS, quotient),
    torch.cat: concat,
    torch.concat: concat,
    torch.concatenate: concat,
    torch.Tensor.__getitem__: index_item,
    torch.Tensor.__setitem__: index_item,
    **{getattr(torch.Tensor, name): escape for name in ("tolist", "numpy", "__array__")},
}
