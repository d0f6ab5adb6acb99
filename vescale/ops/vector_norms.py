"""Vector norms of whole tensors, of every order."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.compat import DTensorSpec, TensorMeta, some_rank_holds_nothing, spec_of
from vescale.ops._call import OpCall
from vescale.ops._combine_ranks import (
    accumulation_dtype,
    add_ranks,
    gather_ranks,
    neutral_extremum,
    reduction_axes,
)
from vescale.ops._conversion import bring, whole
from vescale.ops._decision import Decision
from vescale.ops._registration import handles
from vescale.ops._registry import register_aten
from vescale.ops._row_reductions import reduces_everything, row_reduction
from vescale.placements import without_partials

__all__: list[str] = []

_aten = torch.ops.aten

# How a tensor's local part is reduced: (mesh, axes along which the parts differ).
_Scope = tuple[DeviceMesh, tuple[int, ...]]


def norm_rule(call: OpCall) -> Decision | None:
    """``linalg.vector_norm`` and ``norm`` over all dims; empty local tensors contribute nothing. Replicate.

    Communication: one value of each rank. Over some dims only: see :func:`row_reduction`.
    """
    if call.mutated or not reduces_everything(call):
        return row_reduction(call)
    order = call.argument("ord", call.argument("p", 2))
    spec, inputs = call.operands[0], without_partials(call.operands[0].placements)
    if not _has_norm(spec.shape, _order(order)):
        return None
    call.try_out()
    scope = (spec.mesh, reduction_axes(inputs))
    norms = functools.partial(_norms, _order(order), (scope,), (call.meta,), call.name == "linalg__powsum")
    return Decision((inputs,), ((Replicate(),) * spec.mesh.ndim,), lambda local, *_, **__: norms([local])[0])


def foreach_norm_rule(call: OpCall) -> Decision | None:
    """Reductions of each tensor of a list in which any tensor has one of our placements. Replicate.

    Communication: one value of each rank and tensor, in one collective for all tensors reduced over the same axes.
    """
    order = math.inf if call.name == "_foreach_max" else _order(call.argument("ord", 2))
    if not all(_has_norm(spec.shape, order) for spec in call.operands):
        return None
    call.try_out()
    inputs = tuple(without_partials(spec.placements) for spec in call.operands)
    scopes = tuple((spec.mesh, reduction_axes(placements)) for spec, placements in zip(call.operands, inputs))
    outputs = tuple((Replicate(),) * spec.mesh.ndim for spec in call.operands)
    if call.name == "_foreach_max":
        maxima = functools.partial(_combined, "max", scopes)
        return Decision(inputs, outputs, lambda locals_: maxima([_largest(local) for local in locals_]))
    norms = functools.partial(_norms, order, scopes, tuple(call.meta), call.name == "_foreach_powsum")
    return Decision(inputs, outputs, lambda locals_, *_, **__: norms(locals_))


def _order(order: Any) -> float:
    return 2.0 if order is None else float(order)  # "inf" and "-inf" are numbers too


def _has_norm(shape: Sequence[int], order: float) -> bool:
    """Whether a tensor of ``shape`` has a norm of this order here. For empty tensors PyTorch decides: 0 or an error."""
    return math.prod(shape) > 0 or 0 <= order < math.inf


def _norms(
    order: float, scopes: Sequence[_Scope], metas: Sequence[TensorMeta], powers: bool, locals_: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The norms of the tensors whose parts are ``locals_``; with ``powers`` the sums of powers, without the root."""
    how = "max" if order == math.inf and not powers else "min" if order == -math.inf and not powers else "sum"
    parts = [
        _part(local.to(accumulation_dtype(torch.promote_types(local.dtype, meta.dtype))), order, powers)
        for local, meta in zip(locals_, metas)
    ]
    results = []
    for value, meta in zip(_combined(how, scopes, parts), metas):
        if how == "sum" and not powers and order != 0:
            value = value.sqrt() if order == 2 else value.pow(1 / order)
        results.append(value.to(meta.dtype).view(meta.shape))
    return results


def _part(local: torch.Tensor, order: float, powers: bool) -> torch.Tensor:
    """What one rank contributes to a norm: a sum of powers, or an extremum of absolute values."""
    if order == 0:
        return (local != 0).sum().to(local.abs().dtype)
    if powers:
        return local.abs().pow(order).sum()
    if math.isinf(order):
        if local.numel() == 0:
            return local.abs().new_full((), 0.0 if order > 0 else math.inf)
        return local.abs().amax() if order > 0 else local.abs().amin()
    if local.numel() == 0:
        return local.abs().sum()
    norm: torch.Tensor = torch.linalg.vector_norm(local, order)
    return norm.square() if order == 2 else norm.pow(order)


def _largest(local: torch.Tensor) -> torch.Tensor:
    return local.amax() if local.numel() else neutral_extremum(local, largest=True)


def _combined(how: str, scopes: Sequence[_Scope], parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The parts combined over the ranks; one collective for all parts with the same scope and dtype."""
    together: dict[Any, list[int]] = defaultdict(list)
    for index, (scope, part) in enumerate(zip(scopes, parts)):
        together[*scope, part.dtype].append(index)
    found: list[torch.Tensor] = list(parts)
    for (mesh, axes, _), indices in together.items():
        values = torch.stack([parts[index] for index in indices])
        if how == "sum":
            values = add_ranks(values, mesh, axes)
        else:
            rows = gather_ranks(values, mesh, axes)
            values = rows.amax(0) if how == "max" else rows.amin(0)
        for index, value in zip(indices, values.unbind()):
            found[index] = value
    return found


def _lacks_elements(op: Any, schema: Any) -> bool:
    """Whether a rank has no element of a tensor whose extremum is searched."""
    order = math.inf if op is _aten._foreach_max.default else _order((*schema.args_schema[1:], 2)[0])
    return math.isinf(order) and any(
        isinstance(spec, DTensorSpec) and some_rank_holds_nothing(spec) for spec in schema.args_schema[0]
    )


@handles(_aten._foreach_norm.Scalar, _aten._foreach_max.default, applies=_lacks_elements)
def _foreach_extremum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of tensors with fewer rows than ranks: of all rows on every rank."""
    tensors = [whole(x, str(op)) if some_rank_holds_nothing(spec_of(x)) else x for x in args[0]]
    return op(tensors, *args[1:], **kwargs)


def _is_pending(op: Any, schema: Any) -> bool:
    x = schema.args_schema[0]
    specs = x if isinstance(x, list | tuple) else [x]
    return any(isinstance(spec, DTensorSpec) and any(p.is_partial() for p in spec.placements) for spec in specs)


@handles(_aten.linalg__powsum.default, _aten._foreach_powsum.Scalar, applies=_is_pending)
def _powers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of the value. PyTorch's rule adds up the powers of the terms of a pending sum."""
    x = args[0]
    values = [
        bring(each, without_partials(each.placements), str(op), "self")
        for each in (x if isinstance(x, list | tuple) else [x])
    ]
    return op(values if isinstance(x, list | tuple) else values[0], *args[1:], **kwargs)


register_aten("linalg_vector_norm norm linalg__powsum", rule=norm_rule, communicates=("all_reduce", "all_gather_v"))
register_aten(
    "_foreach_norm _foreach_powsum _foreach_max",
    rule=foreach_norm_rule,
    communicates=("all_reduce", "all_gather_v"),
)
