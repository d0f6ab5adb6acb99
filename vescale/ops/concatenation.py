"""``torch.cat`` on DTensors.

If tensors of equal shape are sharded alike along the dim of concatenation, the result is an :class:`InterleavedShard` of the
concatenated local tensors, and nothing moves; DTensor gathers. Tensors of different sizes are gathered here, too: no
placement describes the concatenation of their shards. Empty 1-D tensors, which torch ignores, have no part in either.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.compat import no_torch_function, stock_dispatch
from vescale.errors import OpPlacementError
from vescale.ops._call import Decision, OpCall
from vescale.ops._conversion import enter_local, leave_local
from vescale.ops._registry import OpContext, handles, register_aten, replaces
from vescale.placements import InterleavedShard


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether :func:`_concatenate` does anything but call the function."""
    tensors = _joined(args, kwargs)
    leaves_out = len(tensors) != len(args[0] if args else kwargs["tensors"])
    return leaves_out or _is_single(tensors, kwargs) or _interleaved_dim(tensors, args, kwargs) is not None


@replaces(torch.cat, torch.concat, torch.concatenate, changes=_changes)
def _concatenate(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, without the empty 1-D tensors that torch ignores (a key/value cache starts as one)."""
    joined = _joined(args, kwargs)
    if _is_single(joined, kwargs):
        return joined[0].clone(memory_format=torch.contiguous_format)  # the rule gathers along a sharded dim
    interleaved = _interleaved(joined, args, kwargs)
    if interleaved is not None:
        return interleaved
    if args:
        return func(joined, *args[1:], **kwargs)
    return func(**{**kwargs, "tensors": joined})


def _joined(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """What is concatenated, in the dtype of the result if anything is left out: its dtype counts."""
    tensors = list(args[0] if args else kwargs["tensors"])
    joined = [tensor for tensor in tensors if not _is_ignored(tensor.shape)]
    if not joined or len(joined) == len(tensors):
        return tensors
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in joined]


def _is_ignored(shape: Sequence[int]) -> bool:
    return len(shape) == 1 and not shape[0]


def _ignores_some(op: Any, schema: Any) -> bool:
    shapes = [x.shape for x in schema.args_schema[0]]
    return any(map(_is_ignored, shapes)) and not all(map(_is_ignored, shapes))


@handles(torch.ops.aten.cat.default, applies=_ignores_some)
def _without_ignored(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Also outside of a model's forward, as ``generate`` splits and joins caches. PyTorch's rule takes an empty 1-D tensor
    for one with all dims."""
    return stock_dispatch(op, (_joined(args, kwargs), *args[1:]), kwargs)


def _is_single(tensors: list[Any], kwargs: dict[str, Any]) -> bool:
    return len(tensors) == 1 and isinstance(tensors[0], DTensor) and "out" not in kwargs


def _interleaved_dim(tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """(dim of concatenation, mesh axis that shards it) if a placement describes the concatenation of local tensors."""
    first = tensors[0]
    if "out" in kwargs or len(tensors) < 2 or not all(isinstance(tensor, DTensor) for tensor in tensors):
        return None
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if not isinstance(dim, int) or not all((t.shape, t.placements) == (first.shape, first.placements) for t in tensors):
        return None
    dim %= first.ndim
    axes = [axis for axis, p in enumerate(first.placements) if type(p) is Shard and p.dim == dim]
    others = (p.is_replicate() or type(p) is Shard for p in first.placements)
    if len(axes) != 1 or not all(others) or first.device_mesh.size(axes[0]) == 1:
        return None
    return dim, axes[0]


def _interleaved(tensors: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """The concatenation of local tensors; None where no placement describes it."""
    found = _interleaved_dim(tensors, args, kwargs)
    if found is None:
        return None
    (dim, axis), first = found, tensors[0]
    placements = list(first.placements)
    placements[axis] = InterleavedShard(dim, len(tensors))
    shape = [*first.shape[:dim], first.shape[dim] * len(tensors), *first.shape[dim + 1 :]]
    local = [enter_local(tensor) for tensor in tensors]
    with no_torch_function():
        return leave_local(torch.cat(local, dim), first.device_mesh, placements, shape, "cat")


# ``stack`` of numbers on several meshes: the norms of gradients that are not all on one mesh.


def stack_rule(call: OpCall) -> Decision | None:
    """``stack`` of replicated numbers on several meshes over the same ranks. Local; the result is on the mesh of the first.

    Raises RuntimeError for meshes of different ranks, some of which lack a number.
    """
    if len({spec.mesh for spec in call.operands}) == 1:
        return None
    if any(math.prod(spec.shape) != 1 or not all(p.is_replicate() for p in spec.placements) for spec in call.operands):
        return None
    first = frozenset(call.mesh.mesh.flatten().tolist())
    other = next((s.mesh for s in call.operands if frozenset(s.mesh.mesh.flatten().tolist()) != first), None)
    if other is not None:
        raise OpPlacementError(
            f"{call.op}: numbers on {call.mesh} and on {other}, which have different ranks; expected meshes over the "
            "same ranks: read the numbers with full_tensor(), and send them to all ranks"
        )
    whole = (Replicate(),) * call.mesh.ndim
    return Decision(tuple(tuple(spec.placements) for spec in call.operands), (whole,), local=call.op)


register_aten("stack", rule=stack_rule)
