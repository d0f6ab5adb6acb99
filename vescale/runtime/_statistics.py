"""Pending sums that the model's own code needs the value of: means over all tokens in a load-balancing loss, for example.

Such a statistic is a number, or a vector, that each rank has summed over its tokens. Linear functions leave it pending;
where a function is not linear in it, it is reduced first, one all-reduce of so many numbers, as a loss is that the model
computes. Left to DTensor, one of two factors would stay pending, and so would all gradients behind it, to be reduced at
full size.

No plan could place these sums elsewhere: they are made and used inside one forward. So the reduction does not count as
implicit; it is in the ledger, asked for by ``statistic``. A pending sum with more than one dim larger than 1 is an
activation that some ``<out>`` entry should place, and is left alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import asking
from vescale.compat import local_of, make_dtensor, no_torch_function, spec_of, stock_dispatch
from vescale.ops import bring, convert
from vescale.placements import move_local, shard_dim

if TYPE_CHECKING:
    from vescale.runtime._runtime import Runtime

__all__ = [
    "ADDITIONS",
    "NONLINEAR",
    "OFFSETS",
    "PRODUCTS",
    "QUOTIENTS",
    "addition",
    "mean",
    "nonlinear",
    "offset",
    "product",
    "quotient",
    "scatter_add",
    "total",
]

_UNARY = [
    "abs",
    "exp",
    "log",
    "log1p",
    "pow",
    "rsqrt",
    "sqrt",
    "square",
    "sigmoid",
    "softmax",
    "log_softmax",
    "std",
    "tanh",
    "var",
    "norm",
    "max",
    "min",
    "clamp",
    "relu",
]
# In any operand; linear in each, but not in two; linear in the dividend alone.
NONLINEAR = [getattr(owner, name) for name in _UNARY for owner in (torch, torch.Tensor) if hasattr(owner, name)]
NONLINEAR += [torch.Tensor.__pow__, torch.Tensor.__rpow__, torch.Tensor.__rdiv__]
PRODUCTS = [torch.mul, torch.multiply, torch.dot, torch.Tensor.mul, torch.Tensor.multiply, torch.Tensor.dot]
PRODUCTS += [torch.Tensor.__mul__, torch.Tensor.__rmul__, torch.Tensor.mul_, torch.Tensor.__imul__]
QUOTIENTS = [
    torch.div,
    torch.divide,
    torch.true_divide,
    torch.Tensor.div,
    torch.Tensor.divide,
    torch.Tensor.true_divide,
]
QUOTIENTS += [torch.Tensor.__truediv__, torch.Tensor.__div__, torch.Tensor.div_, torch.Tensor.__itruediv__]
OFFSETS = [torch.add, torch.sub, torch.subtract, torch.rsub]
OFFSETS += [getattr(torch.Tensor, name) for name in ("add", "sub", "__add__", "__radd__", "__sub__", "__rsub__")]
# In place: what is written to keeps its placement.
ADDITIONS = [getattr(torch.Tensor, name) for name in ("add_", "sub_", "__iadd__", "__isub__")]


def addition(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    whole = isinstance(args[0], DTensor) and all(placement.is_replicate() for placement in args[0].placements)
    return func(args[0], *(_reduced(x, func) if whole else x for x in args[1:]), **kwargs)


def nonlinear(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*(_reduced(x, func) for x in args), **kwargs)


def product(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if sum(_is_pending(x) for x in args) > 1:
        args = tuple(_reduced(x, func) for x in args)
    return func(*args, **kwargs)


def offset(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A number added to a statistic counts once, not on every rank. Zero, which ``sum()`` begins with, leaves it pending."""
    if len(args) == 2 and not kwargs:
        for number, x in (args, args[::-1]):
            if isinstance(number, int | float) and _is_pending(x):
                if number == 0 and func in (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__):
                    return x * 1
                return func(*(_reduced(operand, func) for operand in args))
    return func(*args, **kwargs)


def mean(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of pending sums, and over cut dims: the sum of all over the number of all, pending. Stock DTensor reduces the former,
    gathers the latter where the cut is uneven (a mean of means is another number), and its pending averages do not add
    to pending sums."""
    over = _reduced_dims(args, kwargs)
    x = args[0]
    if over is None or x.dtype not in (torch.float32, torch.float64):
        return func(*args, **kwargs)
    if not any(p.is_partial("sum") or shard_dim(p) in over for p in x.placements):
        return func(*args, **kwargs)
    keepdim = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    return total(runtime, torch.sum, (x, over, keepdim), {}) / math.prod(x.shape[dim] for dim in over)


def total(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A sum over unevenly cut dims gives each rank its rows' gradient, not all rows': DTensor would gather what meets it."""
    over = _reduced_dims(args, kwargs)
    if over is not None and any(_is_uneven(args[0], dim) for dim in over):
        x = args[0]
        back = [None if p.is_partial() else p for p in x.placements]
        args = (convert(x, back, requester=func.__name__), *args[1:])
    return func(*args, **kwargs)


def _reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The dims of ``reduction(x, dim, keepdim)``; None for other calls."""
    x, *given = args
    if not isinstance(x, DTensor) or not x.ndim or len(given) > 2 or kwargs.keys() - {"dim", "keepdim"}:
        return None
    dims = given[0] if given else kwargs.get("dim")
    dims = range(x.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims or range(x.ndim)
    return tuple(sorted({dim % x.ndim for dim in dims}))


def _is_uneven(x: DTensor, dim: int) -> bool:
    num_ranks = math.prod(x.device_mesh.size(axis) for axis, p in enumerate(x.placements) if p == Shard(dim))
    return x.shape[dim] % num_ranks != 0


def quotient(runtime: Runtime, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args[:1], *(_reduced(x, func) for x in args[1:]), **kwargs)


def _is_pending(x: Any) -> bool:
    """Whether it is a statistic that is still a sum."""
    return (
        isinstance(x, DTensor)
        and any(placement.is_partial() for placement in x.placements)
        and sum(size > 1 for size in x.shape) <= 1
    )


def _reduced(x: Any, func: Any) -> Any:
    if not _is_pending(x):
        return x
    target: list[Placement] = [Replicate() if placement.is_partial() else placement for placement in x.placements]
    return convert(x, target, requester=f"statistic: {func.__name__}")


def scatter_add(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``counts.scatter_add(0, expert of each token, number)`` into a vector that every rank has: each adds up its tokens."""
    x, _, index, source = args
    vectors = all(isinstance(t, DTensor) and t.ndim == 1 for t in (x, index, source))
    if (
        not vectors
        or not all(p.is_replicate() for p in x.placements)
        or all(p.is_replicate() for p in index.placements)
    ):
        return stock_dispatch(op, args, kwargs)
    if any(shard_dim(p) is None and not p.is_replicate() for p in index.placements):
        return stock_dispatch(op, args, kwargs)
    with no_torch_function():
        own = local_of(bring(source, index.placements, str(op), "src"))
        summed = [Replicate() if p.is_replicate() else Partial() for p in index.placements]
        added = torch.zeros_like(local_of(x)).scatter_add(0, local_of(index), own)
        with asking("statistic: scatter_add"):
            added = move_local(added, x.device_mesh, x.shape, summed, x.placements).wait()
        if op is torch.ops.aten.scatter_add_.default:
            local_of(x).add_(added)
            return x
        return make_dtensor(local_of(x) + added, spec_of(x))
