"""How placements flow through ops between two planned boundaries, if that is certain; unknown otherwise.

These rules leave no choice: replicated operands give a replicated result; elementwise ops keep a common placement; the
results of ``linear`` and ``embedding`` follow from their weights; views move a dim. If DTensor has a choice, the result
is unknown, and so is all that follows from it up to the next planned placement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.ops import is_elementwise as is_elementwise_op
from vescale.ops import normalizes_locally
from vescale.placements import InterleavedShard, at_dim, shard_dim

__all__ = ["AxisPlacement", "Flow", "Rule", "indexed_dims", "is_elementwise", "rule_for", "sums_gradient_first"]

# A placement on one axis; None: unknown.
AxisPlacement = Placement | None

# (arguments, result) -> placement of the result on one axis of `size` ranks, by the placements of the tensor arguments.
Rule = Callable[["Flow"], AxisPlacement]


@dataclass(frozen=True)
class Flow:
    """One call of an op, seen on one axis.

    Attributes:
        placements: the placement of each tensor argument, in order.
        tensors: the tensor arguments.
        result: what the op returned.
        args, kwargs: all its arguments.
        size: ranks on the axis.
    """

    placements: Sequence[AxisPlacement]
    tensors: Sequence[torch.Tensor]
    result: torch.Tensor
    args: Sequence[Any]
    kwargs: dict[str, Any]
    size: int


def rule_for(name: str, flow: Flow, others: Mapping[str, Rule]) -> AxisPlacement:
    """The placement of the result of the op called ``name``, or None; ``others``: rules for ops that have none here."""
    if all(isinstance(placement, Replicate) for placement in flow.placements):
        return Replicate()
    rule = _RULES.get(name.strip("_")) or others.get(name) or (_elementwise if is_elementwise(name) else None)
    return rule(flow) if rule is not None and None not in flow.placements else None


@functools.cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends on the operands' elements at the same place only: by the registry's family
    of elementwise ops, for the ATen op of the torch function ``name``."""
    base = name.strip("_")
    if name.startswith("__") and base[0] in "ri":  # y + x and x += y
        base = base[1:]
    packet = getattr(torch.ops.aten, {"truediv": "div"}.get(base, base), None)
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    if "dim" in overloads:  # max and min: of two tensors, or a reduction
        return False
    return base in _COPIES or any(is_elementwise_op(getattr(packet, overload)) for overload in overloads)


def sums_gradient_first(name: str, flow: Flow, cuts: Sequence[int | None], num_ranks: Sequence[int]) -> bool:
    """Whether the backward of an op sums what is pending in the gradient of its result before it uses it, so that the
    gradients of its operands are whole where the result is. ``cuts``: the dim of its first operand that each axis cuts."""
    if name not in _NORMS or not flow.tensors or not (shape := _normalized_shape(flow)):
        return False
    x = flow.tensors[0]
    return normalizes_locally(x.shape, x.ndim - len(shape), cuts, num_ranks)


def _linear(flow: Flow) -> AxisPlacement:
    x, weight = flow.placements[:2]
    last = flow.tensors[0].ndim - 1
    if _cuts(weight, 0):
        return Shard(last) if isinstance(x, Replicate) else None
    if _cuts(weight, 1):
        return Partial() if _cuts(x, last) or isinstance(x, Replicate) else None
    if isinstance(weight, Replicate) and _is_cut(x) and shard_dim(x) != last:
        return x
    return None


def _embedding(flow: Flow) -> AxisPlacement:
    indices, weight = flow.placements[:2]
    if isinstance(indices, Replicate):
        if _cuts(weight, 0):
            return Partial()  # indices of other ranks' rows give zero here
        return Shard(flow.result.ndim - 1) if _cuts(weight, 1) else None
    return indices if isinstance(weight, Replicate) else None


def _elementwise(flow: Flow) -> AxisPlacement:
    """The common placement; replicated and one-element operands follow it."""
    found: set[Placement] = set()
    for placement, tensor in zip(flow.placements, flow.tensors):
        if tensor.ndim == 0 and isinstance(placement, Replicate):
            continue
        dim = shard_dim(placement) if placement is not None else None
        if dim is not None:
            if not _is_cut(placement) or tensor.shape[dim] != flow.result.shape[dim - tensor.ndim]:
                return None
            found.add(at_dim(placement, flow.result.ndim + dim - tensor.ndim))
        elif placement is not None:
            found.add(placement)
    shards = found - {Replicate()}
    only = next(iter(shards)) if len(shards) == 1 else None
    return only if _is_cut(only) else None


def _sum_like(flow: Flow) -> AxisPlacement:
    """Addition also keeps Partial, where every operand is."""
    if all(isinstance(placement, Partial) and placement == flow.placements[0] for placement in flow.placements):
        return flow.placements[0]
    return _elementwise(flow)


def _along_dims(flow: Flow) -> AxisPlacement:
    """Reductions, softmax and normalization: kept on a dim that they do not go along."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if any(not isinstance(placement, Replicate) for placement in flow.placements[1:]) or not _is_cut(x):
        return None
    if flow.result.ndim != tensor.ndim:
        return None
    dims = flow.kwargs.get("dim", flow.args[1] if len(flow.args) > 1 else None)
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        return None
    return None if x.dim in {dim % tensor.ndim for dim in dims} else x


def _normalize(flow: Flow) -> AxisPlacement:
    """``layer_norm`` and ``rms_norm`` go along the last dims; their weights are replicated."""
    x, tensor = flow.placements[0], flow.tensors[0]
    shape = _normalized_shape(flow)
    if (
        any(not isinstance(placement, Replicate) for placement in flow.placements[1:])
        or not _is_cut(x)
        or shape is None
    ):
        return None
    return x if x.dim < tensor.ndim - len(shape) else None


def _normalized_shape(flow: Flow) -> Sequence[int] | None:
    shape = flow.kwargs.get("normalized_shape", flow.args[1] if len(flow.args) > 1 else None)
    return (shape,) if isinstance(shape, int) else shape


def _view(flow: Flow) -> AxisPlacement:
    """A cut dim that opens a group of dims stays cut when the group is merged or split, if its new dim divides evenly, or is
    as long as before."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x):
        return None
    before = math.prod(tensor.shape[: x.dim])
    for dim in range(flow.result.ndim):
        size = flow.result.shape[dim]
        if math.prod(flow.result.shape[:dim]) == before and size > 1:
            divides = type(x) is Shard and size % flow.size == 0 and tensor.shape[x.dim] % flow.size == 0
            return at_dim(x, dim) if divides or size == tensor.shape[x.dim] else None
    return None


def _transpose(flow: Flow) -> AxisPlacement:
    x, ndim = flow.placements[0], flow.tensors[0].ndim
    first, second = (int(dim) % ndim for dim in flow.args[1:3])
    return at_dim(x, {first: second, second: first}.get(x.dim, x.dim)) if _is_cut(x) else None


def _permute(flow: Flow) -> AxisPlacement:
    x, dims = flow.placements[0], flow.kwargs.get("dims", flow.args[1:])
    dims = dims[0] if len(dims) == 1 and isinstance(dims[0], tuple | list) else dims
    return at_dim(x, [dim % len(dims) for dim in dims].index(x.dim)) if _is_cut(x) else None


def _expand(flow: Flow) -> AxisPlacement:
    """A dim that has its length already stays cut."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x):
        return None
    dim = x.dim + flow.result.ndim - tensor.ndim
    return at_dim(x, dim) if flow.result.shape[dim] == tensor.shape[x.dim] else None


def _unsqueeze(flow: Flow) -> AxisPlacement:
    x, dim = flow.placements[0], int(flow.args[1] if len(flow.args) > 1 else flow.kwargs["dim"]) % flow.result.ndim
    return at_dim(x, x.dim + 1 if x.dim >= dim else x.dim) if _is_cut(x) else None


def _item(flow: Flow) -> AxisPlacement:
    """``x[:, None, 3]``: a cut dim that is taken whole stays cut."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x):
        return None
    for dim, item, after in indexed_dims(flow.args[1], tensor.ndim):
        if dim == x.dim and isinstance(item, slice):
            return at_dim(x, after) if len(range(*item.indices(tensor.shape[dim]))) == tensor.shape[dim] else None
    return None


def indexed_dims(index: Any, ndim: int) -> Iterator[tuple[int, Any, int]]:
    """(dim, what is taken of it, the result's dim) of ``x[index]`` with numbers, slices, None and ``...``; nothing for other
    indices."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is ... or isinstance(item, int | slice) for item in index):
        return
    rest = [slice(None)] * (ndim - sum(item is not None and item is not ... for item in index))
    at = index.index(...) if ... in index else len(index)
    before = after = 0
    for item in (*index[:at], *rest, *index[at + 1 :]):
        if item is not None:
            yield before, item, after
        before, after = before + (item is not None), after + (not isinstance(item, int))


def _same_shape_dim(flow: Flow) -> AxisPlacement:
    """Splits and concatenations along other dims."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x) or any(placement != x for placement in flow.placements) or flow.result.ndim != tensor.ndim:
        return None
    return x if flow.result.shape[x.dim] == tensor.shape[x.dim] else None


def _concatenated(flow: Flow) -> AxisPlacement:
    """``cat`` leaves vectors without elements out: what a key-value cache holds at first."""
    pairs = zip(flow.placements, flow.tensors)
    kept = [(placement, tensor) for placement, tensor in pairs if tensor.shape != (0,)]
    if not kept:
        return None
    placements, tensors = zip(*kept)
    return _same_shape_dim(replace(flow, placements=placements, tensors=tensors))


def _matmul(flow: Flow) -> AxisPlacement:
    """Products of matrices, of which each rank has a part of both batches."""
    x, tensor = flow.placements[0], flow.tensors[0]
    if not _is_cut(x) or any(placement != x for placement in flow.placements):
        return None
    return x if all(each.ndim == tensor.ndim for each in flow.tensors) and x.dim < tensor.ndim - 2 else None


def _addmm(flow: Flow) -> AxisPlacement:
    """Rows of the first matrix, or columns of the second one with their bias, give those of the result."""
    bias, x, weight = flow.placements[:3]
    if _is_cut(x) and x.dim == 0:
        return x if isinstance(bias, Replicate) and isinstance(weight, Replicate) else None
    if not isinstance(x, Replicate) or not _is_cut(weight) or weight.dim == 0 or flow.tensors[0].ndim > 1:
        return None
    return weight if bias == at_dim(weight, 0) else None


def _attention(flow: Flow) -> AxisPlacement:
    """Attention over a part of the batch or of the heads: the query's, whether keys and values are cut alike or whole. Over
    a part of the sequence: the query's, whatever is exchanged for it."""
    query, *others = flow.placements[:3]
    if shard_dim(query) == flow.tensors[0].ndim - 2:  # type: ignore[arg-type]
        return query
    if type(query) is not Shard or query.dim > 1:
        return None
    return query if all(placement == query or isinstance(placement, Replicate) for placement in others) else None


def _is_cut(placement: AxisPlacement) -> TypeGuard[Shard | InterleavedShard]:
    """In contiguous parts, or in interleaved pieces."""
    return type(placement) in (Shard, InterleavedShard)


def _cuts(placement: AxisPlacement, dim: int) -> bool:
    return type(placement) is Shard and placement.dim == dim


# Elementwise functions without an ATen op of their name, and random ones.
_COPIES = frozenset(("dropout", "type_as", "contiguous", "float", "to", "half", "bfloat16", "double", "view_as"))
_NORMS = ("layer_norm", "rms_norm")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("add", "radd", "iadd", "sub", "isub"), _sum_like),
    **dict.fromkeys(("mean", "sum", "softmax", "var"), _along_dims),
    **dict.fromkeys(_NORMS, _normalize),
    **dict.fromkeys(("view", "reshape", "flatten"), _view),
    **dict.fromkeys(("chunk", "split"), _same_shape_dim),
    **dict.fromkeys(("matmul", "bmm"), _matmul),
    "addmm": _addmm,
    "cat": _concatenated,
    "expand": _expand,
    "getitem": _item,
    "linear": _linear,
    "embedding": _embedding,
    "permute": _permute,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    F.scaled_dot_product_attention.__name__: _attention,
}
