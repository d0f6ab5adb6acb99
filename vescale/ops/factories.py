"""``zeros_like``, ``new_zeros`` and the like: the result keeps the operand's sharding when it has its shape."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from vescale.ops._call import OpCall
from vescale.ops._decision import Decision
from vescale.ops._registry import register_aten
from vescale.placements import ragged_axis, without_partials

__all__: list[str] = []

_aten = torch.ops.aten
# The op that makes the same tensor after an operand of its shape.
_LIKE: dict[str, Any] = {
    "new_zeros": _aten.zeros_like.default,
    "new_ones": _aten.ones_like.default,
    "new_empty": _aten.empty_like.default,
    "new_empty_strided": _aten.empty_like.default,
    "new_full": _aten.full_like.default,
}


def factory_rule(call: OpCall) -> Decision | None:
    """No communication. The values do not depend on the operand's, so a Partial operand gives Replicate.

    ``new_zeros(size)`` and the like keep the sharding when ``size`` is the operand's shape, and are Replicate otherwise.
    """
    spec = call.operands[0]
    placements = without_partials(spec.placements)
    if call.name in _LIKE:
        if tuple(call.argument("size")) != tuple(spec.shape):
            return Decision((spec.placements,), ((Replicate(),) * spec.mesh.ndim,), local=call.op)
        num_sizes = 2 if call.name == "new_empty_strided" else 1
        return Decision((spec.placements,), (placements,), functools.partial(_like, _LIKE[call.name], num_sizes))
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


register_aten("zeros_like ones_like empty_like full_like", rule=factory_rule)
register_aten(" ".join(_LIKE), rule=factory_rule)
