"""``x[index]`` and ``x[index] = value`` on DTensors, with Python lists and numpy arrays among the indices; embeddings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import DTensorSpec, ask_mixed, assert_on_device, local_of, no_torch_function, stock_dispatch
from vescale.errors import IndexBoundsError, UnsupportedOpError
from vescale.ops._call import Decision, OpCall
from vescale.ops._conversion import (
    bring,
    bring_with_gradient,
    convert,
    enter_local,
    leave_local,
    local_parameter,
    local_rows,
    rows_from_local,
    sharded_rows,
    wrap_global,
)
from vescale.ops._observer import running_module
from vescale.ops._registry import OpContext, When, handles, register_aten, replaces
from vescale.ops.elementwise import align, part_of, row_major
from vescale.ops.interleaved import interleaved_rule
from vescale.ops.slicing import split
from vescale.placements import InterleavedShard, at_dim, is_pending, local_region, shard_dim, without_partials


@replaces(torch.Tensor.__getitem__, torch.Tensor.__setitem__, when=When.INDEX)
def _index_item(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """DTensor's own rule, with lists and arrays among the indices converted to tensors that are the same on every rank."""
    x, index, *value = args
    if func is torch.Tensor.__getitem__ and isinstance(x, DTensor):
        part = _piece(context, x, index if isinstance(index, tuple) else (index,))
        if part is not None:
            return part
    items = tuple(_as_tensor(context, item) for item in (index if isinstance(index, tuple) else (index,)))
    if func is torch.Tensor.__setitem__ and any(_is_mask(item) for item in items):
        if len(items) == 1 and (not isinstance(value[0], torch.Tensor) or value[0].ndim == 0):
            mask = items[0]
            x.masked_fill_(mask.view(*mask.shape, *(1 for _ in range(x.ndim - mask.ndim))), value[0])
            return None
        # DTensor takes a mask for a vector of positions.
        items = tuple(part for item in items for part in (item.nonzero().unbind(1) if _is_mask(item) else (item,)))
    return func(x, items if isinstance(index, tuple) or len(items) > 1 else items[0], *value)


def _piece(context: OpContext, x: DTensor, index: tuple[Any, ...]) -> Any:
    """``x[..., start:stop]`` of exactly one chunk of an interleaved dim, computed by ``chunk``, so that neither it nor its
    gradient is redistributed. None for any other index."""
    cuts = [placement for placement in x.placements if isinstance(placement, InterleavedShard)]
    if len(cuts) != 1 or not all(item is ... or isinstance(item, slice) for item in index) or index.count(...) > 1:
        return None
    (cut,) = cuts
    rest = [slice(None)] * (x.ndim - sum(item is not ... for item in index))
    at = index.index(...) if ... in index else len(index)
    items = [*index[:at], *rest, *index[at + 1 :]]
    length, uneven = divmod(x.shape[cut.dim], cut.num_chunks)
    whole = all(item == slice(None) for dim, item in enumerate(items) if dim != cut.dim)
    start, stop, step = items[cut.dim].indices(x.shape[cut.dim])
    if uneven or not whole or step != 1 or stop - start != length or start % length:
        return None
    return split(context, torch.chunk, (x, cut.num_chunks, cut.dim), {})[start // length]


def _is_mask(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype == torch.bool and item.ndim > 0


def _as_tensor(context: OpContext, item: Any) -> Any:
    if not isinstance(item, list | range | np.ndarray):
        return item
    try:
        made = torch.tensor(item)
    except (TypeError, ValueError):
        return item  # a list of slices and the like stands for a tuple
    if made.dtype.is_floating_point:
        made = made.long()  # an empty list
    return wrap_global(made, context.mesh, context.replicated, "index")


# ``require_in_bounds``: the error of one device for indices out of bounds, where ranks look up parts of a dim. Each
# rank takes zeros for what others hold, so that an index which nobody has would give zeros, silently.


def require_in_bounds(indices: torch.Tensor, size: int, op: str, edit: str) -> None:
    """Require ``0 <= index < size`` of every index of a local tensor. No communication; on a GPU no wait of the host.

    Raises:
        IndexBoundsError: on a CPU, as the kernel of one device. A GPU stops at an assertion on the device, as there.
    """
    if type(indices) is not torch.Tensor or indices.is_meta or torch.compiler.is_compiling():
        return
    outside = (indices < 0) | (indices >= size)
    if not indices.is_cpu:
        assert_on_device(~outside.any(), f"{op}: indices out of bounds (0..{size - 1})")
    elif bool(outside.any()):
        first = int(indices[outside][0])
        raise IndexBoundsError(
            f"{op}: {int(outside.sum())} of {indices.numel()} indices are out of bounds, the first is {first}; expected "
            f"0..{size - 1}: {edit}"
        )


# ``x[mask] = value``, which is elementwise although the op is ``index_put``.


def masked_rule(call: OpCall) -> Decision | None:
    """``index_put`` of one value at a boolean mask of the tensor's own shape runs on the local tensors. None for every
    other index."""
    if call.argument("accumulate", False):
        return None
    indices = call.argument("indices")
    if len(indices) != 1 or not isinstance(indices[0], DTensorSpec) or len(call.operands) != 3:
        return None
    tensor, mask, values = call.operands
    if mask.tensor_meta is None or mask.tensor_meta.dtype != torch.bool:
        return None
    if mask.shape != tensor.shape or math.prod(values.shape) != 1 or not tensor.shape:
        return None
    alignment = align(call.name, call.operands, tensor.shape, call.mutated)
    if alignment is None or alignment.broadcasts:
        return None
    fill = _fill_in_place if call.mutated else _fill
    return Decision(alignment.inputs, (alignment.leader,), local=fill, prepare=alignment.prepare)


def _fill(local: torch.Tensor, indices: list[torch.Tensor], value: torch.Tensor, *args: Any) -> torch.Tensor:
    return local.masked_fill(indices[0], value.reshape(()))


def _fill_in_place(local: torch.Tensor, indices: list[torch.Tensor], value: torch.Tensor, *args: Any) -> torch.Tensor:
    return local.masked_fill_(indices[0], value.reshape(()))


register_aten("index_put index_put_", rule=masked_rule)


def index_rule(call: OpCall) -> Decision | None:
    """Dims without an index stay as they are. None for masks: what they take depends on values."""
    indices = [spec.tensor_meta for spec in call.operands[1:]]
    has_mask = any(meta is None or meta.dtype in (torch.bool, torch.uint8) for meta in indices)
    return None if has_mask else interleaved_rule(call)


register_aten("index", rule=index_rule)


# ``gather`` along a sharded dim (the scores of given classes), and ``one_hot``.

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


@replaces(torch.gather, torch.Tensor.gather, changes=_changes)
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
    require_in_bounds(index, x.shape[dim], _OP, "check the indices, or the size of the dim that they refer to")
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


def _accumulated(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor | None:
    """``x.index_put(indices, values, accumulate=True)``: the values that each rank adds are a term of a sum; values that
    are sharded on a dim that is not indexed shard the result. None for other calls and other placements of the operands."""
    x, indices, values = args[:3]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    plain = not isinstance(values, DTensor) or any(index is None for index in indices)
    if op is not torch.ops.aten.index_put.default or not accumulate or plain:
        return None
    if all(p.is_replicate() for p in values.placements):
        return None
    mesh, num_indexed = values.device_mesh, len(indices)
    num_leading = max(index.ndim for index in indices)
    if values.ndim != num_leading + x.ndim - num_indexed:
        return None  # values that are broadcast
    out: list[Placement] = []
    for axis, own in enumerate(values.placements):
        placed = x.placements[axis] if isinstance(x, DTensor) else Replicate()
        if own.is_replicate() and placed.is_replicate():
            out.append(Replicate())
        elif is_pending(own, "sum") or (type(own) is Shard and own.dim < num_leading):
            out.append(Partial())
        elif type(own) is Shard:
            out.append(Shard(own.dim - num_leading + num_indexed))
        else:
            return None
        if placed not in (Replicate(), out[-1]):
            return None

    def of_index(index: torch.Tensor) -> list[Placement]:
        found: list[Placement] = []
        for own in values.placements:
            dim = own.dim - num_leading + index.ndim if type(own) is Shard and own.dim < num_leading else -1
            is_cut = dim >= 0 and type(own) is Shard and index.shape[dim] == values.shape[own.dim]
            found.append(Shard(dim) if is_cut else Replicate())
        return found

    local = part_of(x, mesh, out, str(op), "self")
    chosen = [part_of(index, mesh, of_index(index), str(op), "indices") for index in indices]
    return row_major(op(local, chosen, local_of(values), True), mesh, out, x.shape)


@handles(torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default, takes_plain=True)
def _index_put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Values may be plain, the same on every rank: the backward of ``x[positions] = values`` puts plain zeros there. So may
    be positions, outside of a model: those of ``out[labels != -100]``."""
    found = _accumulated(op, args, kwargs)
    if found is not None:
        return found
    x, indices, values, *more = args
    if not isinstance(x, DTensor) or running_module() is None:
        result = ask_mixed(op, args, kwargs)
        if result is not NotImplemented:
            return result
    # DTensor's rule takes a mask for one of rows.
    if isinstance(x, DTensor) and any(type(p) is Shard and p.dim for p in x.placements):
        indices = [part for index in indices for part in _positions(index)]
    if isinstance(x, DTensor) and not isinstance(values, DTensor):
        values = wrap_global(values, x.device_mesh, (Replicate(),) * x.device_mesh.ndim, str(op))
    return stock_dispatch(op, (x, indices, values, *more), kwargs)


def _positions(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    return index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else (index,)


# Embedding lookup in a table with sharded rows (vocabulary parallelism), and bags of embeddings over a sharded batch.


_LOOKUP = "embedding"
_LOOKUP_SIGNATURE = inspect.signature(F.embedding)
_BAG_SIGNATURE = inspect.signature(F.embedding_bag)


class _Call(NamedTuple):
    indices: Any
    weight: Any
    padding: int | None
    counts: bool  # scale_grad_by_freq
    renorms: bool  # max_norm
    is_sparse: bool

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if func is F.embedding:
            call = _LOOKUP_SIGNATURE.bind(*args, **kwargs)
            call.apply_defaults()
            given = call.arguments
            padding, renorms = given["padding_idx"], given["max_norm"] is not None
            counts = bool(given["scale_grad_by_freq"])
            return cls(given["input"], given["weight"], padding, counts, renorms, bool(given["sparse"]))
        weight, indices = args[0], args[1]
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        counts = args[3] if len(args) > 3 else kwargs.get("scale_grad_by_freq", False)
        sparse = args[4] if len(args) > 4 else kwargs.get("sparse", False)
        return cls(indices, weight, None if padding == -1 else padding, bool(counts), False, bool(sparse))


def _needs_other_ranks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether rows are sharded, or counted: the gradient may arrive sharded where the batch is not; or a sparse gradient is
    asked for: those of DTensors are dense."""
    call = _Call.of(func, args, kwargs)
    return (
        call.counts
        or call.is_sparse
        or any(shard_dim(placement) == 0 for placement in getattr(call.weight, "placements", ()))
    )


@replaces(F.embedding, torch.embedding, changes=_needs_other_ranks)
def _embedding(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Each rank looks up the rows that it holds and takes zeros for the others; the result is Partial.

    It is a plain ``Partial(sum)``, which every op understands; stock DTensor's result is a masked one, which only a
    redistribution does. If the rows of the table are not sharded, DTensor's own rule is used, except with
    ``scale_grad_by_freq``, which counts rows in the whole batch: the indices are gathered.

    Raises:
        IndexBoundsError: an index that no rank has a row for.
        UnsupportedOpError: ``max_norm`` on a table with sharded rows, or together with ``scale_grad_by_freq``.
    """
    call = _Call.of(func, args, kwargs)
    weight, indices, padding = call.weight, call.indices, call.padding
    is_placed = isinstance(weight, DTensor) and isinstance(indices, DTensor)
    if not is_placed or not _needs_other_ranks(func, args, kwargs):
        return func(*args, **kwargs)
    if call.renorms:
        raise UnsupportedOpError(
            f"{_LOOKUP}: max_norm with a table of placements {tuple(weight.placements)} and indices of placements "
            f"{tuple(indices.placements)} needs rows of other ranks; remove max_norm, or replicate both"
        )
    padding = padding + weight.shape[0] if padding is not None and padding < 0 else padding
    return _lookup(context, weight, indices, padding, call.counts)


def _lookup(context: OpContext, weight: DTensor, indices: DTensor, padding: int | None, counts: bool) -> DTensor:
    mesh = context.mesh
    index_target: list[Placement] = []
    weight_target: list[Placement] = []
    grads: list[Placement] = []
    out: list[Placement] = []
    for own, of_index in zip(weight.placements, indices.placements):
        dim = shard_dim(own)
        if dim is not None:  # a sharded table meets whole indices
            index_target.append(Replicate())
            weight_target.append(own)
            grads.append(own)
            out.append(Partial() if dim == 0 else at_dim(own, indices.ndim + dim - 1))
        else:
            kept = Replicate() if of_index.is_partial() else of_index
            index_target.append(kept)
            weight_target.append(Replicate())
            grads.append(Replicate() if kept.is_replicate() else Partial())
            out.append(kept)
    with no_torch_function():
        local_indices = local_of(bring(indices, index_target, _LOOKUP, "indices"))
        weight = bring_with_gradient(weight, weight_target, _LOOKUP, "weight")
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        ranges = local_region(tuple(weight.shape), tuple(weight_target), tuple(mesh.shape), coordinate).intervals[0]
        require_in_bounds(local_indices, weight.shape[0], _LOOKUP, "check the tokenizer, or the table's number of rows")
        table = enter_local(weight, grads)
        local = _local_lookup(table, local_indices, ranges, padding)
        if counts and local.requires_grad:
            whole = local_of(bring(indices, (Replicate(),) * mesh.ndim, _LOOKUP, "indices"))
            times = torch.bincount(whole.reshape(-1), minlength=weight.shape[0])[local_indices].unsqueeze(-1)
            local.register_hook(lambda grad: grad / times)
        return leave_local(local, mesh, out, (*indices.shape, weight.shape[1]), _LOOKUP)


def _local_lookup(
    table: torch.Tensor, indices: torch.Tensor, ranges: tuple[tuple[int, int], ...], padding: int | None
) -> torch.Tensor:
    """Rows of the local table, which holds the global rows ``ranges``; zeros without a gradient for all other rows."""
    rows = torch.full_like(indices, -1)
    local_padding, position = None, 0
    for start, stop in ranges:
        inside = (indices >= start) & (indices < stop)
        rows = torch.where(inside, indices - start + position, rows)
        if padding is not None and start <= padding < stop:
            local_padding = padding - start + position
        position += stop - start
    missing = rows < 0
    if table.shape[0] == 0:  # more ranks than rows
        return table.new_zeros(*indices.shape, table.shape[1]) + table.sum()
    found = F.embedding(rows.masked_fill(missing, 0), table, local_padding)
    return found.masked_fill(missing.unsqueeze(-1), 0)


@replaces(F.embedding_bag)
def _embedding_bag(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank computes its bags of equal length, ``(batch, length)``, with the whole table. Bags that are concatenated,
    with offsets, are gathered to every rank.

    Raises:
        NotImplementedError: ``max_norm`` or ``scale_grad_by_freq`` over sharded bags, which depend on other bags.
    """
    call = _BAG_SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    bags, table = options["input"], options["weight"]
    if not isinstance(table, DTensor):  # outside of the model's own parameters
        return func(*args, **kwargs)
    mesh, name = table.device_mesh, "embedding_bag"
    rows = sharded_rows(bags, 0) if bags.ndim == 2 else [False] * mesh.ndim
    if any(rows) and (options["max_norm"] is not None or options["scale_grad_by_freq"]):
        raise UnsupportedOpError(
            f"{name}: max_norm and scale_grad_by_freq over bags of shape {tuple(bags.shape)} with placements "
            f"{tuple(bags.placements)} need the bags of other ranks; remove them, or write R for the module's <in>"
        )
    for operand in ("input", "offsets", "per_sample_weights"):
        if isinstance(options[operand], DTensor):
            options[operand] = local_rows(options[operand], rows, 0, name, operand)
    options["weight"] = local_parameter(table, rows, name)
    with no_torch_function():
        local = func(*call.args, **call.kwargs)
    num_bags = bags.shape[0] if bags.ndim == 2 else local.shape[0]
    return rows_from_local(local, 0, num_bags, mesh, rows, name)
