"""Ops that return a Python value: ``equal``, ``allclose``, ``item``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.ops._call import OpCall
from vescale.ops._combine_ranks import gather_ranks, reduction_axes
from vescale.ops._decision import Decision
from vescale.ops._registry import register_aten
from vescale.placements import has_custom, without_partials

__all__: list[str] = []


def compare_rule(call: OpCall) -> Decision | None:
    """The second operand is moved to the first one's placements, or the first to the second's if only those are custom.

    Communication: the move, and one byte of each rank for the common answer.
    """
    first, second = call.operands
    if first.shape != second.shape:
        if call.name == "allclose":
            return None
        return Decision((first.placements, second.placements), None, lambda *_, **__: False)
    target = without_partials((first if has_custom(first.placements) else second).placements)
    agree = functools.partial(_agreed, call.op, first.mesh, reduction_axes(target))
    return Decision((target, target), None, agree)


def _agreed(op: Any, mesh: DeviceMesh, axes: tuple[int, ...], *args: Any, **kwargs: Any) -> bool:
    own = torch.tensor([op(*args, **kwargs)], device=args[0].device)
    return bool(gather_ranks(own, mesh, axes).all().item())


def item_rule(call: OpCall) -> Decision:
    """``item()`` gathers the tensor's one element."""
    return Decision(((Replicate(),) * call.mesh.ndim,), None)


register_aten("equal allclose", rule=compare_rule, communicates=("all_gather_v",))
register_aten("_local_scalar_dense", rule=item_rule)
