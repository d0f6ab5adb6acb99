"""Tensors made after another: they keep its sharding when they have its shape."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from vescale.placements._kinds import ragged_axis
from vescale.placements._rules._call import Decision, OpCall, names

__all__ = ["factory_rule"]

_aten = torch.ops.aten
_LIKE = names("zeros_like ones_like empty_like full_like")
_NEW: dict[str, Any] = {
    "new_zeros": _aten.zeros_like.default,
    "new_ones": _aten.ones_like.default,
    "new_empty": _aten.empty_like.default,
    "new_empty_strided": _aten.empty_like.default,
    "new_full": _aten.full_like.default,
}


def factory_rule(call: OpCall) -> Decision | None:
    """Local, without communication. Values do not depend on the operand's, so a Partial operand gives Replicate.

    ``new_zeros(size)`` and its kin keep the sharding when ``size`` is the operand's shape, and are Replicate otherwise.
    """
    if call.name not in _LIKE and call.name not in _NEW:
        return None
    spec = call.operands[0]
    placements = tuple(Replicate() if placement.is_partial() else placement for placement in spec.placements)
    if call.name in _NEW:
        if tuple(call.argument("size")) != tuple(spec.shape):
            return Decision((spec.placements,), ((Replicate(),) * spec.mesh.ndim,), local=call.op)
        num_sizes = 2 if call.name == "new_empty_strided" else 1
        return Decision((spec.placements,), (placements,), functools.partial(_like, _NEW[call.name], num_sizes))
    if ragged_axis(placements) is not None and call.kwargs.get("memory_format") is not None:
        return Decision((spec.placements,), (placements,), functools.partial(_row_major, call.op))
    return Decision((spec.placements,), (placements,))


def _like(op: Any, num_sizes: int, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = op(local, *args[num_sizes:], **kwargs)
    return result


def _row_major(op: Any, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Flat local tensors have no other memory format."""
    result: torch.Tensor = op(local, *args, **{**kwargs, "memory_format": None})
    return result
