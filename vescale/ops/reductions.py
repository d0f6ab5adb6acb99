"""Reductions of a whole tensor to one value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

from vescale.comm import all_gather_v, all_reduce, axis_group
from vescale.compat import DTensorSpec, TensorMeta, some_rank_holds_nothing, stock_dispatch
from vescale.ops._call import Decision, OpCall, Placements, with_placements
from vescale.ops._conversion import whole
from vescale.ops._registry import handles, register_aten
from vescale.ops.views import refit_ragged, runs_of
from vescale.placements import is_sharded, own_region, ragged_axis, shard_dim, without_partials

# The last step of a reduction: combining a few values of each rank.


def reduction_axes(placements: Placements) -> tuple[int, ...]:
    """The mesh axes along which ranks hold different elements."""
    return tuple(axis for axis, placement in enumerate(placements) if is_sharded(placement))


def gather_ranks(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """``values`` (flat, the same length everywhere) of all ranks along ``axes``, one row for each.

    Used where an all-reduce would not do what one device does: a maximum loses NaN, gloo has no boolean or.
    """
    if not axes:
        return values.unsqueeze(0)
    group = axis_group(mesh, axes)
    sizes = [values.numel()] * group.size
    return all_gather_v(values.contiguous(), sizes, group.group, requester="reduction").wait().view(group.size, -1)


def add_ranks(values: torch.Tensor, mesh: DeviceMesh, axes: Sequence[int]) -> torch.Tensor:
    """The sum of ``values`` over all ranks along ``axes``; one all-reduce."""
    if not axes:
        return values
    if values.is_complex():
        return gather_ranks(values.reshape(-1), mesh, axes).sum(0).view(values.shape)
    return all_reduce(values, "sum", axis_group(mesh, axes).group, requester="reduction").wait()


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is accumulated in float32, as kernels on one device do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def neutral_extremum(like: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """The identity of max (``largest``) or min for the dtype of ``like``, without dims."""
    if like.dtype == torch.bool:
        return like.new_full((), not largest)
    if like.dtype.is_floating_point:
        return like.new_full((), -math.inf if largest else math.inf)
    bounds = torch.iinfo(like.dtype)
    return like.new_full((), bounds.min if largest else bounds.max)


# Reductions over trailing dims of a ragged tensor: local where every rank holds whole rows.


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

    kernel: Callable[[_Reduction, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]
    mesh: DeviceMesh
    axes: tuple[int, ...]
    numel: int
    metas: tuple[TensorMeta, ...]
    call: OpCall

    def __call__(self, local: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = self.kernel(self, local)
        values = found if isinstance(found, tuple) else (found,)
        results = tuple(value.to(meta.dtype).view(meta.shape) for value, meta in zip(values, self.metas))
        return results if len(results) > 1 else results[0]

    @property
    def dtype(self) -> torch.dtype:
        return accumulation_dtype(self.metas[0].dtype)

    def add(self, value: torch.Tensor) -> torch.Tensor:
        return add_ranks(value, self.mesh, self.axes)

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return gather_ranks(value.reshape(1), self.mesh, self.axes).view(-1)


def _mean(of: _Reduction, local: torch.Tensor) -> torch.Tensor:
    return of.add(local.sum(dtype=of.dtype)) / of.numel


def _amax(of: _Reduction, local: torch.Tensor) -> torch.Tensor:
    return of.gather(local.amax() if local.numel() else neutral_extremum(local, largest=True)).amax()


def _amin(of: _Reduction, local: torch.Tensor) -> torch.Tensor:
    return of.gather(local.amin() if local.numel() else neutral_extremum(local, largest=False)).amin()


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


def _std_mean(of: _Reduction, local: torch.Tensor) -> tuple[torch.Tensor, ...]:
    var, mean = _var_mean(of, local)
    return var.sqrt(), mean


_KERNELS: dict[str, Callable[[_Reduction, torch.Tensor], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "sum": lambda of, local: of.add(local.sum(dtype=of.dtype)),
    "nansum": lambda of, local: of.add(local.nansum(dtype=of.dtype)),
    "mean": _mean,
    "prod": lambda of, local: of.gather(local.prod(dtype=of.dtype)).prod(),
    "any": lambda of, local: of.gather(local.any()).any(),
    "all": lambda of, local: of.gather(local.all()).all(),
    "amax": _amax,
    "max": _amax,
    "amin": _amin,
    "min": _amin,
    "count_nonzero": lambda of, local: of.add(local.count_nonzero()),
    "var": lambda of, local: _var_mean(of, local)[0],
    "std": lambda of, local: _var_mean(of, local)[0].sqrt(),
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


register_aten(" ".join(_KERNELS), rule=reduction_rule)
register_aten("logsumexp", rule=row_reduction)


# ``argmax`` and ``argmin`` of a whole tensor.


def argmax_rule(call: OpCall) -> Decision | None:
    """The position in the row-major flattening, the first one among equals, as on one device. Replicate.

    Ranks that hold nothing take part. Communication: a value and an index of each rank. With ``dim``: see
    :func:`row_reduction`.
    """
    call.try_out()  # with ``dim`` too: stock DTensor takes booleans there, which one device refuses
    spec = call.operands[0]
    if call.argument("dim") is not None or math.prod(spec.shape) == 0:
        return row_reduction(call)
    inputs = without_partials(spec.placements)
    where = _Extremum(call.name == "argmax", spec, inputs, call.meta.shape)
    return Decision((inputs,), ((Replicate(),) * spec.mesh.ndim,), where)


@dataclass(frozen=True)
class _Extremum:
    largest: bool
    spec: DTensorSpec
    placements: Placements
    result_shape: torch.Size

    def __call__(self, local: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        mesh = self.spec.mesh
        region = own_region(self.spec.shape, self.placements, mesh)
        assert region is not None  # only ranks of the mesh run local functions
        if local.numel():
            flat = local.reshape(-1)
            index = int((flat.argmax() if self.largest else flat.argmin()).item())
            value, position = flat[index], region.global_offset(index)
        else:  # a value that every element beats, by its position where the values are equal
            value, position = neutral_extremum(local, largest=self.largest), math.prod(self.spec.shape)
        axes = reduction_axes(self.placements)
        values = gather_ranks(value.reshape(1), mesh, axes).view(-1)
        positions = gather_ranks(torch.tensor([position], device=local.device), mesh, axes).view(-1)
        best = values[values.argmax() if self.largest else values.argmin()]  # NaN wins, as on one device
        wins = values.isnan() if best.isnan() else values == best
        return positions[wins].min().view(self.result_shape)


def _stock_fails(op: Any, schema: Any) -> bool:
    """PyTorch's combination of what ranks find takes no empty part, and no dim of a vector."""
    x, dim = schema.args_schema[0], dims_of(schema)
    return reduces_a_shard(x, dim) and (some_rank_holds_nothing(x) or (x.ndim == 1 and dim is not None))


@handles(torch.ops.aten.argmax.default, torch.ops.aten.argmin.default, applies=_stock_fails)
def _of_all_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The position among all elements, which every rank gets."""
    return op(whole(args[0], str(op)), *args[1:], **kwargs)


register_aten("argmax argmin", rule=argmax_rule)


# Sums and products of all elements up to each one.


def _counts_from_the_end(op: Any, schema: Any) -> bool:
    """Whether ``op(x, dim, ...)`` is over a sharded dim that has a negative number."""
    x, dim = schema.args_schema[0], dims_of(schema)
    return isinstance(dim, int) and dim < 0 < x.ndim and reduces_a_shard(x, dim)


@handles(
    _aten.cumsum.default,
    _aten.cumprod.default,
    _aten.logcumsumexp.default,
    applies=_counts_from_the_end,
)
def _scan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same over the dim's positive number, which is what PyTorch's rule compares with the dims of shards: for a negative
    one, each rank would begin anew."""
    x, dim, *others = args
    return op(x, dim % x.ndim, *others, **kwargs)
