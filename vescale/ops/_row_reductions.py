"""Reductions over trailing dims of a ragged tensor: local where every rank holds whole rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from vescale.compat import DTensorSpec, TensorMeta
from vescale.ops._call import OpCall, with_placements
from vescale.ops._decision import Decision
from vescale.ops._refit import refit_ragged, runs_of
from vescale.placements import ragged_axis, shard_dim, without_partials

__all__ = ["dims_of", "reduces_a_shard", "reduces_everything", "row_reduction"]


def reduces_everything(call: OpCall) -> bool:
    """Whether the op reduces every dim of its first operand: no ``dim``, none of them, or all of them."""
    dims = call.argument("dim")
    if dims is None:
        return True
    if isinstance(dims, int):
        return False
    ndim = call.operands[0].ndim
    return not dims or {dim % max(ndim, 1) for dim in dims} == set(range(ndim))


def dims_of(schema: Any, position: int = 1) -> Any:
    """The dims that a call reduces, as they are given: a list or a number in the argument at ``position``, or None."""
    return schema.args_schema[position] if len(schema.args_schema) > position else schema.kwargs_schema.get("dim")


def reduces_a_shard(x: DTensorSpec, dims: int | Sequence[int] | None) -> bool:
    """Whether a reduction of ``x`` over ``dims`` (None or none: all) is over a dim that is not whole on every rank."""
    dims = [dims] if isinstance(dims, int) else dims
    ndim = len(x.shape)
    over = [dim % max(ndim, 1) for dim in dims] if dims else range(ndim)
    return any(
        not placement.is_replicate() if (dim := shard_dim(placement)) is None else dim in over
        for placement in x.placements
    )


def row_reduction(call: OpCall) -> Decision | None:
    """A reduction over trailing dims: each rank reduces its rows, and the result is ragged with the same runs of rows.

    No communication. None for another op, for dims in front of those, and where a row is divided between ranks.
    """
    if call.mutated or len(call.operands) != 1:
        return None
    spec = call.operands[0]
    axis, dims = ragged_axis(spec.placements), call.argument("dim")
    if axis is None or dims is None or spec.ndim == 0:
        return None
    reduced = sorted({dim % spec.ndim for dim in ([dims] if isinstance(dims, int) else dims)})
    if not reduced or reduced[0] == 0:
        return None
    first = reduced[0]
    inputs = without_partials(spec.placements)
    if any((dim := shard_dim(placement)) is not None and dim >= first for placement in inputs):
        return None
    row = math.prod(spec.shape[first:])
    settled = with_placements(spec, inputs)
    if row == 0 or any(edge % row for run in runs_of(settled) for edge in run):
        return None
    call.try_out()
    metas = (call.meta,) if isinstance(call.meta, TensorMeta) else tuple(call.meta)
    result_row = math.prod(size for dim, size in enumerate(spec.shape) if dim >= first and dim not in reduced)
    runs = [(begin // row * result_row, end // row * result_row) for begin, end in runs_of(settled)]
    outputs = refit_ragged(settled, metas[0].shape, inputs, runs)
    if outputs is None:
        return None
    new_dims = [dim - first + 1 for dim in reduced]
    position = next(i for i in range(len(call.args) + 1) if i == len(call.args) or call.argument_name(i) == "dim")
    rows = functools.partial(
        _reduce_rows, call.op, tuple(spec.shape[first:]), position, new_dims, isinstance(dims, int)
    )
    return Decision((inputs,), (outputs,) * len(metas), rows)


def _reduce_rows(
    op: Any,
    row: tuple[int, ...],
    position: int,
    dims: list[int],
    single: bool,
    local: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The op on the local rows as a matrix (or more dims), with ``dim`` counted there; results flat."""
    wanted: Any = dims[0] if single else dims
    if "dim" in kwargs:
        kwargs = {**kwargs, "dim": wanted}
    else:
        args = (*args[: position - 1], wanted, *args[position:])
    result = op(local.view(-1, *row), *args, **kwargs)
    return tuple(one.reshape(-1) for one in result) if isinstance(result, tuple) else result.reshape(-1)
