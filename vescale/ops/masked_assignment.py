"""``x[mask] = value``, which is elementwise although the op is ``index_put``."""

from __future__ import annotations

import math
from typing import Any

import torch

from vescale.compat import DTensorSpec
from vescale.ops._alignment import align
from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._registry import register_aten

__all__: list[str] = []


def masked_rule(call: OpCall) -> Decision | None:
    """``index_put`` of one value at a boolean mask of the tensor's own shape runs on the local tensors. None for every
    other index."""
    if call.argument("accumulate", False):
        return None
    indices = call.argument("indices")
    if len(indices) != 1 or not isinstance(indices[0], DTensorSpec) or len(call.operands) != 3:
        return None
    tensor, mask, values = call.operands
    if mask.tensor_meta is None or mask.tensor_meta.dtype != torch.bool:
        return None
    if mask.shape != tensor.shape or math.prod(values.shape) != 1 or not tensor.shape:
        return None
    alignment = align(call.name, call.operands, tensor.shape, call.mutated)
    if alignment is None or alignment.broadcasts:
        return None
    fill = _fill_in_place if call.mutated else _fill
    return Decision(alignment.inputs, (alignment.leader,), local=fill, prepare=alignment.prepare)


def _fill(local: torch.Tensor, indices: list[torch.Tensor], value: torch.Tensor, *args: Any) -> torch.Tensor:
    return local.masked_fill(indices[0], value.reshape(()))


def _fill_in_place(local: torch.Tensor, indices: list[torch.Tensor], value: torch.Tensor, *args: Any) -> torch.Tensor:
    return local.masked_fill_(indices[0], value.reshape(()))


register_aten("index_put index_put_", rule=masked_rule)
