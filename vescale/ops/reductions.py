"""Reductions of a whole tensor to one value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.compat import DTensorSpec, TensorMeta, some_rank_holds_nothing, stock_dispatch
from vescale.ops._call import OpCall
from vescale.ops._combine_ranks import (
    accumulation_dtype,
    add_ranks,
    gather_ranks,
    neutral_extremum,
    reduction_axes,
)
from vescale.ops._conversion import whole
from vescale.ops._decision import Decision
from vescale.ops._registration import handles
from vescale.ops._registry import register_aten
from vescale.ops._row_reductions import dims_of, reduces_a_shard, reduces_everything, row_reduction
from vescale.placements import without_partials

__all__: list[str] = []

_aten = torch.ops.aten


def reduction_rule(call: OpCall) -> Decision | None:
    """Each rank reduces what it holds (nothing gives the neutral value) and the ranks' values are combined at once.

    The result is Replicate, not Partial: ``item()`` and comparisons of a pending value would be local in stock DTensor.
    Communication: one value of each rank. Over some dims only: see :func:`row_reduction`.
    """
    if len(call.operands) != 1 or call.mutated or not reduces_everything(call):
        return row_reduction(call)
    kernel = _KERNELS[call.name]
    call.try_out()
    spec = call.operands[0]
    inputs = without_partials(spec.placements)
    metas = (call.meta,) if isinstance(call.meta, TensorMeta) else tuple(call.meta)
    reduction = _Reduction(kernel, spec.mesh, reduction_axes(inputs), math.prod(spec.shape), metas, call)
    return Decision((inputs,), ((Replicate(),) * spec.mesh.ndim,) * len(metas), reduction)


@dataclass(frozen=True)
class _Reduction:
    """Runs in place of the op on the local tensor."""

    kernel: Callable[[_Reduction, torch.Tensor], tuple[torch.Tensor, ...]]
    mesh: DeviceMesh
    axes: tuple[int, ...]
    numel: int
    metas: tuple[TensorMeta, ...]
    call: OpCall

    def __call__(self, local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        results = tuple(
            value.to(meta.dtype).view(meta.shape) for value, meta in zip(self.kernel(self, local), self.metas)
        )
        return results if len(results) > 1 else results[0]

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.metas[0].dtype)

    def add(self, value: torch.Tensor) -> torch.Tensor:
        return add_ranks(value, self.mesh, self.axes)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return gather_ranks(value.reshape(1), self.mesh, self.axes).view(-1)


def _sum(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.add(local.sum(dtype=of.dtype)),)


def _mean(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.add(local.sum(dtype=of.dtype)) / of.numel,)


def _nansum(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.add(local.nansum(dtype=of.dtype)),)


def _count_nonzero(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.add(local.count_nonzero()),)


def _prod(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.gather(local.prod(dtype=of.dtype)).prod(),)


def _any(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.gather(local.any()).any(),)


def _all(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (of.gather(local.all()).all(),)


def _amax(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own = local.amax() if local.numel() else neutral_extremum(local, largest=True)
    return (of.gather(own).amax(),)


def _amin(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own = local.amin() if local.numel() else neutral_extremum(local, largest=False)
    return (of.gather(own).amin(),)


def _var_mean(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two passes: the mean first, then squared distances from it."""
    local = local.to(accumulation_dtype(local.dtype))
    mean = of.add(local.sum()) / of.numel
    squares = of.add((local - mean).abs().square().sum())
    correction = of.call.argument("correction")
    if correction is None:
        correction = int(of.call.argument("unbiased", True))
    degrees = max(of.numel - correction, 0)
    return squares / degrees if degrees else squares / 0.0, mean


def _var(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _var_mean(of, local)[:1]


def _std(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_var_mean(of, local)[0].sqrt(),)


def _std_mean(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    var, mean = _var_mean(of, local)
    return var.sqrt(), mean


_KERNELS: dict[str, Callable[[_Reduction, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "sum": _sum,
    "nansum": _nansum,
    "mean": _mean,
    "prod": _prod,
    "any": _any,
    "all": _all,
    "amax": _amax,
    "max": _amax,
    "amin": _amin,
    "min": _amin,
    "count_nonzero": _count_nonzero,
    "var": _var,
    "std": _std,
    "var_mean": _var_mean,
    "std_mean": _std_mean,
}


@handles(_aten._is_all_true.default, _aten._is_any_true.default)
def _is_true(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As ``all`` and ``any``, which PyTorch has strategies for: the arguments of each distribution are checked so."""
    return args[0].all() if op is _aten._is_all_true.default else args[0].any()


def _names_no_dim(op: Any, schema: Any) -> bool:
    dims = dims_of(schema)
    return dims is not None and not isinstance(dims, int) and not dims


@handles(_aten.any.dims, _aten.all.dims, applies=_names_no_dim)
def _as_boolean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``any`` and ``all`` over an empty list of dims reduce none of them, unlike other reductions. uint8 stays uint8."""
    x = args[0]
    return (x != 0).to(torch.uint8 if x.dtype is torch.uint8 else torch.bool)


@handles(_aten.nansum.default, applies=_names_no_dim)
def _nansum_of_all(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over every dim. On meta tensors, PyTorch reduces none of them."""
    return op(args[0], None, *args[2:], **{name: value for name, value in kwargs.items() if name != "dim"})


def _keeps_dims_behind(op: Any, schema: Any) -> bool:
    args = schema.args_schema
    return len(args) > 2 and bool(args[2]) and isinstance(args[0], DTensorSpec) and args[0].is_sharded()


@handles(_aten.logsumexp.default, applies=_keeps_dims_behind)
def _logsumexp(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``keepdim`` by name. Given by position, PyTorch's rule does not see it, and counts the result's dims as without."""
    return stock_dispatch(op, args[:2], {**kwargs, "keepdim": args[2]})


def _lacks_elements(op: Any, schema: Any) -> bool:
    """Whether a rank has no element of the dims that ``op(x, dim=None, ...)`` reduces."""
    x = schema.args_schema[0]
    return some_rank_holds_nothing(x) and reduces_a_shard(x, dims_of(schema))


@handles(
    _aten.max.default,
    _aten.min.default,
    _aten.max.dim,
    _aten.min.dim,
    _aten.amax.default,
    _aten.amin.default,
    _aten.aminmax.default,
    applies=_lacks_elements,
)
def _extremum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Where a rank has no row: of all rows on every rank. PyTorch runs a kernel that takes no empty tensor, on some ranks,
    and the others wait for these."""
    return op(whole(args[0], str(op)), *args[1:], **kwargs)


register_aten(" ".join(_KERNELS), rule=reduction_rule, communicates=("all_reduce", "all_gather_v"))
register_aten("logsumexp", rule=row_reduction)
