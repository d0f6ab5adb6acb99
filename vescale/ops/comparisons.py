"""Ops that return a Python value: ``equal``, ``allclose``, ``item``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.compat import local_of
from vescale.ops._call import OpCall
from vescale.ops._combine_ranks import gather_ranks, reduction_axes
from vescale.ops._conversion import bring
from vescale.ops._decision import Decision
from vescale.ops._registration import handles
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


def _are_stock(op: Any, schema: Any) -> bool:
    return not any(has_custom(spec.placements) for spec in schema.args_schema)


@handles(torch.ops.aten.equal.default, applies=_are_stock, communicates=("all_gather_v",))
def _equal(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of placements that stock DTensor knows, by the ranks of the operands' mesh. Stock DTensor asks all ranks of the
    default process group, also those that run another stage of a pipeline, or are in no mesh of the model, and never answer.

    Communication: operands are moved to the second one's placements; and one byte of each rank, where ranks have parts.
    """
    first, second = args
    if first.shape != second.shape:
        return False
    target = without_partials(second.placements)
    own = (local_of(bring(x, target, "equal", name)) for x, name in ((first, "self"), (second, "other")))
    return _agreed(op, first.device_mesh, reduction_axes(target), *own, **kwargs)


def _agreed(op: Any, mesh: DeviceMesh, axes: tuple[int, ...], *args: Any, **kwargs: Any) -> bool:
    if not axes:
        return bool(op(*args, **kwargs))
    own = torch.tensor([op(*args, **kwargs)], device=args[0].device)
    return bool(gather_ranks(own, mesh, axes).all().item())


def item_rule(call: OpCall) -> Decision:
    """``item()`` gathers the tensor's one element."""
    return Decision(((Replicate(),) * call.mesh.ndim,), None)


register_aten("equal allclose", rule=compare_rule, communicates=("all_gather_v",))
register_aten("_local_scalar_dense", rule=item_rule)
