"""``zeros_like``, ``new_zeros`` and the like: the result keeps the operand's sharding when it has its shape.

Random ops are refused where :mod:`vescale.rng`, which has handlers for them, is not enabled.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, make_dtensor, make_spec, no_torch_function, spec_of, stock_dispatch
from vescale.errors import OpPlacementError
from vescale.ops._call import Decision, OpCall
from vescale.ops._observer import running_module
from vescale.ops._registry import register, register_aten, register_family
from vescale.ops.elementwise import run_row_major
from vescale.placements import FlattenedShard, has_custom, ragged_axis, shard_dim, without_partials

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

    ``new_zeros(size)`` and the like keep the sharding when ``size`` has as many dims as the operand, and its sizes at
    the sharded ones; they are Replicate otherwise.
    """
    spec = call.operands[0]
    placements = without_partials(spec.placements)
    if call.name in _LIKE:
        size = tuple(call.argument("size"))
        if size != tuple(spec.shape):
            if call.name != "new_empty_strided" and _keeps(placements, tuple(spec.shape), size):
                dims = frozenset(dim for p in placements if (dim := shard_dim(p)) is not None)
                return Decision((spec.placements,), (placements,), functools.partial(_resized, call.op, dims))
            return Decision((spec.placements,), ((Replicate(),) * spec.mesh.ndim,), local=call.op)
        num_sizes = 2 if call.name == "new_empty_strided" else 1
        return Decision((spec.placements,), (placements,), functools.partial(_like, _LIKE[call.name], num_sizes))
    if ragged_axis(placements) is not None and call.kwargs.get("memory_format") is not None:
        return Decision((spec.placements,), (placements,), functools.partial(run_row_major, call.op))
    return Decision((spec.placements,), (placements,))


def _keeps(placements: tuple[Placement, ...], shape: tuple[int, ...], size: tuple[int, ...]) -> bool:
    """Whether a tensor of another size can be cut where the operand is."""
    dims = [None if p.is_replicate() else shard_dim(p) for p in placements]
    is_cut_by_dims = all(p.is_replicate() or dim is not None for p, dim in zip(placements, dims))
    is_flattened = any(isinstance(p, FlattenedShard) for p in placements)
    return (
        is_cut_by_dims
        and not is_flattened
        and len(shape) == len(size)
        and all(shape[dim] == size[dim] for dim in dims if dim is not None)
    )


def _resized(op: Any, dims: frozenset[int], local: torch.Tensor, size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = [local.shape[dim] if dim in dims else n for dim, n in enumerate(size)]
    result: torch.Tensor = op(local, own, *args, **kwargs)
    return result


def _like(op: Any, num_sizes: int, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = op(local, *args[num_sizes:], **kwargs)
    return result


def _is_resized(op: Any, schema: Any) -> bool:
    spec, size = schema.args_schema[0], schema.args_schema[1]
    if not isinstance(spec, DTensorSpec) or tuple(size) == tuple(spec.shape) or has_custom(spec.placements):
        return False
    return _keeps(without_partials(spec.placements), tuple(spec.shape), tuple(size))


def _new_of_size(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Inside a model, where stock DTensor makes it Replicate, so that what is written to it would be gathered first."""
    if running_module() is None:
        return stock_dispatch(op, args, kwargs)
    x, size, *more = args
    spec = spec_of(x)
    placements = without_partials(spec.placements)
    dims = frozenset(dim for p in placements if (dim := shard_dim(p)) is not None)
    with no_torch_function():
        made = _resized(op, dims, local_of(x), size, *more, **kwargs)
        stride = torch.empty(size, device="meta").stride()
        return make_dtensor(made, make_spec(spec.mesh, placements, torch.Size(size), stride, made.dtype))


register_aten("zeros_like ones_like empty_like full_like", rule=factory_rule)
register_aten(" ".join(_LIKE), rule=factory_rule)
for _name in ("new_empty", "new_zeros", "new_ones", "new_full"):
    register(getattr(_aten, _name).default, handler=_new_of_size, applies=_is_resized)


def random_rule(call: OpCall) -> Decision | None:
    """Refuse what no handler of :mod:`vescale.rng` has run before."""
    spec = call.operands[0]
    raise OpPlacementError(
        f"{call.op} on a tensor of shape {tuple(spec.shape)} placed as {spec.placements}: unlike on one device, each "
        "rank's generator would draw its own numbers; call vescale.rng.enable(), or draw on a replicated tensor and "
        "redistribute the result"
    )


register_family("random", covers=lambda op: torch.Tag.nondeterministic_seeded in op.tags, rule=random_rule)
