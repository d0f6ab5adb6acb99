"""``gather`` along a sharded dim (the scores of given classes), and ``one_hot``."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, local_of, stock_dispatch
from vescale.ops._context import OpContext
from vescale.ops._conversion import bring, bring_with_gradient, convert, enter_local, leave_local
from vescale.ops._index_bounds import require_in_bounds
from vescale.ops._registration import handles, replaces
from vescale.placements import local_region, without_partials

__all__: list[str] = []

_OP = "gather"


def _signature(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False, out: Any = None) -> None: ...


_SIGNATURE = inspect.signature(_signature)


def _looks_up_parts(x: Any, dim: Any, index: Any) -> bool:
    """Whether ``x`` and ``index`` (DTensors or specs) are such that each rank looks up in its part of ``dim``, which moves
    less than gathering ``x``."""
    if not isinstance(dim, int) or x.ndim == 0 or x.ndim != len(index.shape) or not hasattr(x, "placements"):
        return False
    along = [type(p) is Shard and p.dim == dim % x.ndim for p in x.placements]
    return any(along) and 2 * math.prod(index.shape) <= math.prod(x.shape)


def _changes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    return _looks_up_parts(given["input"], given["dim"], given["index"])


@replaces(torch.gather, torch.Tensor.gather, changes=_changes, communicates=("all_reduce",))
def _gather(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank looks up what it holds and takes zeros for the rest; one all-reduce of the result, and none in backward.

    Stock DTensor gathers the whole operand, or returns a masked placement that few ops understand. No plan could place the
    result otherwise: it does not count as implicit.

    Raises IndexBoundsError.
    """
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    x, dim, index = given["input"], given["dim"], given["index"]
    if given.get("out") is not None or not isinstance(x, DTensor) or not _looks_up_parts(x, dim, index):
        return func(*args, **kwargs)
    targets = _targets(x, dim % x.ndim, index)
    x = bring_with_gradient(x, targets[0], _OP, "input")
    local_index = local_of(bring(index, targets[1], _OP, "index"))
    return _combined(_look_up(x, enter_local(x, targets[2]), dim % x.ndim, local_index), x, index, targets[3])


@handles(torch.ops.aten.gather.default, applies=lambda op, schema: _is_not_stock(*schema.args_schema[:3]))
def _gather_inside(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same inside of functions in C++, as ``take_along_dim``; and with indices for a part of another dim: PyTorch's rule
    shards that dim of both, and each rank would look up in other rows."""
    x, dim, index = args[:3]
    dim %= max(x.ndim, 1)
    if _is_masked(x, dim, index):
        found = stock_dispatch(op, args, kwargs)
        return bring(found, without_partials(found.placements), _OP, "result")
    by_parts = _looks_up_parts(x, dim, index)
    targets = _targets(x, dim, index, by_parts)
    x, index = bring(x, targets[0], _OP, "input"), bring(index, targets[1], _OP, "index")
    local, local_index = local_of(x), local_of(index)
    found = _look_up(x, local, dim, local_index) if by_parts else local.gather(dim, local_index)
    return _combined(found, x, index, targets[3])


def _combined(found: torch.Tensor, x: DTensor, index: Any, placements: tuple[Placement, ...]) -> DTensor:
    """What the ranks have found, added up."""
    pending = leave_local(found, x.device_mesh, placements, tuple(index.shape), _OP)
    return convert(pending, without_partials(placements), requester="gather over shards")


def _is_not_stock(x: Any, dim: int, index: Any) -> bool:
    if not isinstance(x, DTensorSpec) or not isinstance(index, DTensorSpec):
        return False
    return _looks_up_parts(x, dim, index) or _takes_a_part(x, dim, index) or _is_masked(x, dim, index)


def _is_masked(x: Any, dim: int, index: Any) -> bool:
    """Whether PyTorch's rule may return a masked sum, which can be reduced once, and its second use raises."""
    if _looks_up_parts(x, dim, index) or _takes_a_part(x, dim, index) or len(x.shape) != len(index.shape):
        return False
    if not x.shape or index.shape[dim % len(x.shape)] != 1:
        return False
    return any(p.is_partial() or (type(p) is Shard and p.dim == dim % len(x.shape)) for p in x.placements)


def _takes_a_part(x: DTensorSpec, dim: int, index: DTensorSpec) -> bool:
    """Whether ``index`` is smaller than ``x`` in a dim other than ``dim``, and an operand is spread."""
    if all(p.is_replicate() for p in (*x.placements, *index.placements)) or len(x.shape) != len(index.shape):
        return False
    return any(own != other for d, (own, other) in enumerate(zip(x.shape, index.shape)) if d != dim % len(x.shape))


def _targets(x: Any, dim: int, index: Any, by_parts: bool = True) -> tuple[tuple[Placement, ...], ...]:
    """Placements of the operands, of the gradient of ``x`` and of the result."""
    found: list[tuple[Placement, ...]] = []
    for own, of_index in zip(x.placements, index.placements):
        if type(own) is Shard and own.dim == dim and by_parts:  # this part of the dim meets whole indices
            found.append((own, Replicate(), own, Partial()))
        elif type(own) is Shard and own.dim != dim and x.shape[own.dim] == index.shape[own.dim]:
            found.append((own, own, own, own))
        elif type(of_index) is Shard and of_index.dim != dim and x.shape[of_index.dim] == index.shape[of_index.dim]:
            found.append((of_index,) * 4)
        elif type(of_index) is Shard and of_index.dim == dim:
            found.append((Replicate(), of_index, Partial(), of_index))
        else:
            found.append((Replicate(),) * 4)
    return tuple(zip(*found))


def _look_up(x: DTensor, local: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """Of a rank's part ``local`` of ``x``: the values at those global indices that it has, zeros for the others."""
    require_in_bounds(index, x.shape[dim], _OP, "check the indices, or the size of the dim that they point into")
    coordinate = x.device_mesh.get_coordinate()
    assert coordinate is not None  # only ranks of the mesh run functions of its models
    region = local_region(tuple(x.shape), tuple(x.placements), tuple(x.device_mesh.shape), coordinate)
    ((start, stop),) = region.intervals[dim] or ((0, 0),)
    missing = (index < start) | (index >= stop)
    if start == stop:  # more ranks than indices
        return local.new_zeros(index.shape) + local.sum()
    return local.gather(dim, (index - start).masked_fill(missing, 0)).masked_fill(missing, 0)


@replaces(F.one_hot)
def _one_hot(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As on one device, with its check of the classes, which PyTorch leaves out for tensors of other types.

    Raises IndexBoundsError.
    """
    labels = args[0] if args else kwargs.get("input", kwargs.get("tensor"))
    num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if isinstance(labels, DTensor) and num_classes > 0:
        require_in_bounds(local_of(labels), num_classes, "one_hot", "check the labels, or num_classes")
    return func(*args, **kwargs)
