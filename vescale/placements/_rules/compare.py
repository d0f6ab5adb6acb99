"""Ops whose answer is a Python value: ``equal``, ``allclose``, ``item``."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.placements._kinds import has_custom
from vescale.placements._rules._call import Decision, OpCall
from vescale.placements._rules._combine import gather_ranks, reduction_axes, without_partials

__all__ = ["compare_rule"]


def compare_rule(call: OpCall) -> Decision | None:
    """``equal`` and ``allclose`` bring the second operand to the first one's placement (or the other way round if only
    that is ours) and agree on the answer over all ranks: one byte of each. ``item()`` gathers its one element."""
    first = call.operands[0]
    if call.name == "_local_scalar_dense":
        return Decision(((Replicate(),) * first.mesh.ndim,), None)
    if call.name not in ("equal", "allclose"):
        return None
    second = call.operands[1]
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
