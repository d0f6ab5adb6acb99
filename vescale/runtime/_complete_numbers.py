"""Numbers computed from a model's outputs, outside of its forward, are complete when they are made.

A sum or a mean over sharded elements is pending: each rank has its term. Inside of a model that is wanted, for sums are
added before they are reduced. Outside, the number is what a program prints, perhaps on one rank only (``if rank == 0:
print(loss.item())``), which would wait for the others. So a reduction to one number reduces over ranks, too, where the
DTensor is on the mesh of a parallelized model and no model is running. Gradients are the same: that of a pending number is
Replicate as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.checks import step_checks
from vescale.comm import requested_by
from vescale.compat import DTensorSpec, OpHandler, in_backward, no_torch_function, stock_dispatch
from vescale.ops import running_module
from vescale.placements import redistribute
from vescale.runtime._input_checks import check_read

__all__ = ["completing", "number_ops"]

_aten = torch.ops.aten
# By the number of the argument with the reduced dims; None: all are.
_REDUCTIONS: dict[Any, int | None] = {
    _aten.sum.default: None,
    _aten.sum.dim_IntList: 1,
    _aten.mean.default: None,
    _aten.mean.dim: 1,
    _aten.prod.default: None,
    _aten.nansum.default: 1,
    _aten.max.default: None,
    _aten.min.default: None,
    _aten.amax.default: 1,
    _aten.amin.default: 1,
    _aten.dot.default: None,
    _aten.linalg_vector_norm.default: 2,
    _aten.norm.Scalar: None,
}
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def number_ops() -> list[Any]:
    return list(_REDUCTIONS)


def completing(known: OpHandler | None) -> OpHandler:
    """The handler of a reduction, which ``known`` handles as well."""

    def applies(op: Any, schema: Any) -> bool:
        return _gives_number(op, schema) or (known is not None and known.applies(op, schema))

    def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if known is not None and known.applies(op, _Schema(args, kwargs)):
            result = known.run(op, args, kwargs)
        else:
            result = stock_dispatch(op, args, kwargs)
        return _complete(result, str(op))

    return OpHandler(run, applies, known is not None and known.takes_plain)


class _Schema:
    """What handlers ask of a call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args_schema = tuple(x._spec if isinstance(x, DTensor) else x for x in args)
        self.kwargs_schema = kwargs


def _gives_number(op: Any, schema: Any) -> bool:
    """Whether the result is one number, of elements on several ranks of a model's mesh. It does not depend on what is
    running, for answers are remembered."""
    args = schema.args_schema
    spec = args[0]
    if not isinstance(spec, DTensorSpec) or not len(spec.shape) or step_checks(spec.mesh) is None:
        return False
    if all(type(p) is Replicate for p in spec.placements):
        return False
    position = _REDUCTIONS[op]
    if position is None:
        return True
    keeps = args[position + 1] if len(args) > position + 1 else schema.kwargs_schema.get("keepdim", False)
    if keeps:
        return False
    dims = args[position] if len(args) > position else schema.kwargs_schema.get("dim")
    return dims is None or len(dims) in (0, len(spec.shape))


def _complete(result: Any, op: str) -> Any:
    if not isinstance(result, DTensor) or result.ndim or not any(p.is_partial() for p in result.placements):
        return result
    if in_backward() or running_module() is not None:
        return result
    check_read(result, f"the result of {op}")
    with requested_by(f"a number: {op}"), no_torch_function(), torch.no_grad():
        return redistribute(result, result.device_mesh, (Replicate(),) * result.device_mesh.ndim)
