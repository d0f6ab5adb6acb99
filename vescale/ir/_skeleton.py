"""``skeleton_of``: a model without the memory of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vescale.ir._model_copy import copy_model
from vescale.rng import is_deferred


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters are on the meta device; buffers have their values, if there are any."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        tensors = {**module._parameters, **module._buffers, **module.__dict__}
        for tensor in tensors.values():
            if not isinstance(tensor, torch.Tensor) or id(tensor) in memo:
                continue
            if isinstance(tensor, nn.Parameter):
                meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                memo[id(tensor)] = nn.Parameter(meta, requires_grad=tensor.requires_grad)
            elif is_deferred(tensor) or tensor.is_meta:
                memo[id(tensor)] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            else:
                memo[id(tensor)] = tensor.detach().clone()
    return copy_model(model, memo)
