"""Shapes, strides and dtypes of an op's results, from a run on meta tensors.

PyTorch finds them with a new ``FakeTensorMode`` per op, which takes 0.5 to 1.5 ms at each first call and for each new shape.
For the ops here, what the mode does is to call the op's meta kernel, which takes a tenth of that by itself. Forwards on meta
tensors take results from here, too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from vescale.compat.patching import Changes

_aten = torch.ops.aten

# Beside views and elementwise ops.
_OTHERS = frozenset(
    packet.overloadpacket
    for packet in (
        _aten.mm.default,
        _aten.bmm.default,
        _aten.addmm.default,
        _aten.baddbmm.default,
        _aten.sum.default,
        _aten.mean.default,
        _aten.amax.default,
        _aten.cat.default,
        _aten.stack.default,
        _aten._softmax.default,
        _aten._softmax_backward_data.default,
        _aten._log_softmax.default,
        _aten._log_softmax_backward_data.default,
        _aten.clone.default,
        _aten.embedding.default,
        _aten.native_layer_norm.default,
        _aten.native_layer_norm_backward.default,
        _aten._unsafe_view.default,
        _aten._to_copy.default,
        _aten.slice_backward.default,
        _aten.constant_pad_nd.default,
        _aten.embedding_dense_backward.default,
        _aten.zeros_like.default,
        _aten.ones_like.default,
        _aten.full_like.default,
        _aten.empty_like.default,
        _aten.zero_.default,
        _aten.fill_.Scalar,
        _aten.amin.default,
    )
)


def run_on_meta(changes: Changes, hooks: Any) -> None:
    """Let DTensor ask :func:`meta_of_result` first."""
    original: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    @changes.method(ShardingPropagator, "_propagate_tensor_meta_non_cached")
    def propagate_tensor_meta(self: Any, op_schema: OpSchema) -> Any:
        if (
            _is_observed()
            or detect_fake_mode() is not None
            or not (has_meta_kernel(op_schema.op, op_schema.kwargs_schema))
        ):
            return original(self, op_schema)
        return meta_of_result(op_schema.op, op_schema.args_schema, op_schema.kwargs_schema)


def _is_observed() -> bool:
    """Whether a mode sees the ops that is not known to leave those on the meta device alone (``leaves_meta_alone``)."""
    return _len_torch_dispatch_stack() > 0 and not all(
        getattr(mode, "leaves_meta_alone", False) for mode in _get_current_dispatch_mode_stack()
    )


def has_meta_kernel(op: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether ``FakeTensorMode`` does nothing else for the call than to run the op's meta kernel."""
    return _has_meta_kernel(op) and kwargs.get("device") is None


@functools.cache
def _has_meta_kernel(op: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags or torch.Tag.data_dependent_output in op.tags:
        return False
    if op.overloadpacket in _OTHERS:
        return True
    if any(a.name == "device" for a in op._schema.arguments):
        return False
    return torch.Tag.pointwise in op.tags or bool(op._schema._is_view_op())


def meta_of_result(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """One ``TensorMeta`` or several, with None for what is no tensor; ``args`` and ``kwargs`` have specs, or what is known
    of a tensor, for tensors. The op runs once for the same sizes, however they are placed."""
    call = op, _known(args), _known(tuple(kwargs.items())), torch.get_default_dtype()
    try:
        hash(call)
    except TypeError:  # sizes that are symbols, for example
        return _run(*call)
    found = _run_once(*call)
    return list(found) if isinstance(found, list) else found


def result_on_meta(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``op(*args, **kwargs)`` of tensors on the meta device, below autograd. New tensors are made like those of an earlier
    call with the same sizes, because many meta kernels are written in Python and take 0.1 to 1 ms."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if (
        not tensors
        or not _makes_tensors(op)
        or not has_meta_kernel(op, kwargs)
        or not all(type(x) in _PLAIN and x.is_meta and x.layout is torch.strided for x in tensors)
        or _is_observed()
    ):
        return op(*args, **kwargs)
    found = meta_of_result(op, args, kwargs)
    return _made(found) if isinstance(found, TensorMeta) else type(found)(map(_made, found))


@functools.cache
def _makes_tensors(op: Any) -> bool:
    """Whether each result is a tensor with memory of its own."""
    schema = op._schema
    return (
        not schema.is_mutable
        and op is not _aten._unsafe_view.default  # shares memory, which its schema does not tell
        and all(str(one.type) in ("Tensor", "List[Tensor]") and one.alias_info is None for one in schema.returns)
    )


def forget_metas() -> None:
    """The next calls run."""
    _run_once.cache_clear()


def _run(op: Any, args: Any, kwargs: Any, _: torch.dtype) -> Any:
    result = op(*_given(args), **dict(_given(kwargs)))
    if isinstance(result, tuple | list):
        return type(result)(_meta_of(one) for one in result)
    return _meta_of(result)


_PLAIN = (torch.Tensor, torch.nn.Parameter)
# Soon full where sizes change, so that memory does not grow for long.
_run_once = functools.lru_cache(maxsize=512)(_run)


def _known(value: Any) -> Any:
    """What is known of a tensor; other values with their types, by which equal numbers differ."""
    if isinstance(value, DTensorSpec):
        assert value.tensor_meta is not None  # of an operand
        return value.tensor_meta
    if isinstance(value, TensorMeta):
        return value
    if isinstance(value, torch.Tensor):
        return _meta_of(value)
    return type(value), tuple(map(_known, value)) if isinstance(value, list | tuple) else value


def _given(known: Any) -> Any:
    """What :func:`_known` was given, with tensors on the meta device."""
    if isinstance(known, TensorMeta):
        return _made(known)
    kind, value = known
    return kind(map(_given, value)) if issubclass(kind, list | tuple) else value


def _made(known: TensorMeta | None) -> torch.Tensor | None:
    if known is None:
        return None
    return torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device="meta")


def _meta_of(result: Any) -> TensorMeta | None:
    return TensorMeta(result.shape, result.stride(), result.dtype) if isinstance(result, torch.Tensor) else None


# Shapes and strides of ops' results, without a run, where all ways to compute them agree.
#
# A run on meta tensors takes 10 us for some ops and a millisecond for others, whose meta functions are Python. For the ops
# here the shape follows from the operands' in a line, and so do the strides: results are contiguous if the operands are, and
# views have their base's strides. Whatever leaves a choice is left to the run, which also finds the errors: operands that
# are not contiguous, sizes that do not fit, dims of size 1 whose stride is anything.

_OPERANDS = (DTensorSpec, TensorMeta)
# Sizes of a new, contiguous result; sizes and strides of a view; None: the op has to be run.
_Found = Sequence[int] | tuple[Sequence[int], Sequence[int]] | None
_Rule = Callable[..., _Found]


def result_meta(rule: _Rule, args: tuple[Any, ...], dtype: torch.dtype) -> TensorMeta | None:
    """What the result of an op with this rule and of this dtype is, or None."""
    found = rule(*[x.tensor_meta if isinstance(x, DTensorSpec) else x for x in args])
    if found is None:
        return None
    if found and isinstance(found[0], list | tuple):
        sizes, strides = found
        return TensorMeta(torch.Size(sizes), tuple(strides), dtype)  # type: ignore[arg-type]
    sizes = torch.Size(found)  # type: ignore[arg-type]
    return TensorMeta(sizes, _contiguous(sizes), dtype)


@functools.lru_cache(maxsize=1024)
def _contiguous(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a new tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_plain(x: TensorMeta) -> bool:
    """Whether the tensor is contiguous and has no other format, which one of 4 or 5 dims may have beside."""
    return x.stride == _contiguous(x.shape) and (len(x.shape) not in (4, 5) or min(x.shape) > 1)


def _order(x: TensorMeta) -> list[int] | None:
    """The dims from the largest stride to the smallest; None if there are several ways, or elements overlap."""
    order = sorted(range(len(x.shape)), key=x.stride.__getitem__, reverse=True)
    step = 1
    for dim in reversed(order):
        if x.stride[dim] < step or x.shape[dim] <= 1:
            return None
        step = x.stride[dim] * x.shape[dim]
    return order


def _dense(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor with its dims in this order in memory."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def _elementwise(*args: Any) -> _Found:
    metas = [x for x in args if isinstance(x, TensorMeta)]
    shape = metas[0].shape
    if any(x.shape != shape for x in metas):
        try:
            shape = torch.broadcast_shapes(*[x.shape for x in metas])
        except RuntimeError:
            return None
    elif all(map(_is_plain, metas)):
        return shape
    lead = next((x for x in metas if x.shape == shape), None)
    order = None if lead is None else _order(lead)
    if lead is None or order is None:
        return None
    for x in metas:  # none may have its dims in another order
        first = len(shape) - len(x.shape)
        strides = [x.stride[dim - first] for dim in order if dim >= first and x.shape[dim - first] > 1]
        if x is not lead and any(a <= b for a, b in itertools.pairwise(strides)):
            return None
    return shape, _dense(shape, order)


def _like(x: TensorMeta, *_: Any) -> _Found:
    return x.shape if _is_plain(x) else None


def _copy(x: TensorMeta) -> _Found:
    if _is_plain(x):
        return x.shape
    order = _order(x)
    return None if order is None else (x.shape, _dense(x.shape, order))


def _contiguous_copy(x: TensorMeta) -> _Found:
    return x.shape


def _likes(x: TensorMeta, y: TensorMeta, *_: Any) -> _Found:
    return x.shape if x.shape == y.shape and _is_plain(x) and _is_plain(y) else None


def _mm(x: TensorMeta, y: TensorMeta) -> _Found:
    (a, b), (c, d) = x.shape, y.shape
    return (a, d) if b == c else None


def _bmm(x: TensorMeta, y: TensorMeta) -> _Found:
    (n, a, b), (m, c, d) = x.shape, y.shape
    return (n, a, d) if b == c and n == m and _is_plain(x) and _is_plain(y) else None


def _addmm(bias: TensorMeta, x: TensorMeta, y: TensorMeta) -> _Found:
    found = _mm(x, y)
    return found if found is not None and bias.shape in (found, found[1:]) else None


def _view(x: TensorMeta, sizes: Sequence[int]) -> _Found:
    numel = math.prod(x.shape)  # from_local keeps the sequence of sizes that it is given: perhaps no torch.Size
    if numel == 0 or x.stride != _contiguous(x.shape):
        return None
    found = list(sizes)
    if -1 in found:
        position = found.index(-1)
        known = -torch.Size(found).numel()
        if known <= 0 or numel % known:
            return None
        found[position] = numel // known
    found_size = torch.Size(found)
    if found_size.numel() != numel or min(found, default=1) < 0:
        return None
    return found_size, _contiguous(found_size)


def _same_view(x: TensorMeta) -> _Found:
    return (x.shape, x.stride) if x.shape else None


def _t(x: TensorMeta) -> _Found:
    return (x.shape[::-1], x.stride[::-1]) if len(x.shape) == 2 else None


def _transpose(x: TensorMeta, a: int, b: int) -> _Found:
    sizes, strides = list(x.shape), list(x.stride)
    if not sizes:
        return None
    sizes[a], sizes[b] = sizes[b], sizes[a]
    strides[a], strides[b] = strides[b], strides[a]
    return sizes, strides


def _unsqueeze(x: TensorMeta, dim: int) -> _Found:
    sizes, strides = list(x.shape), list(x.stride)
    dim = dim + len(sizes) + 1 if dim < 0 else dim
    stride = sizes[dim] * strides[dim] if dim < len(sizes) else 1
    return [*sizes[:dim], 1, *sizes[dim:]], [*strides[:dim], stride, *strides[dim:]]


def _bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    first = start or 0
    last = size if end is None else end
    first = max(0, first + size if first < 0 else min(first, size))
    last = last + size if last < 0 else min(last, size)
    return first, max(first, last)


def _slice(x: TensorMeta, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> _Found:
    sizes, strides = list(x.shape), list(x.stride)
    if not sizes or step < 1:
        return None
    first, last = _bounds(sizes[dim], start, end)
    sizes[dim] = -(-(last - first) // step)
    strides[dim] *= step
    return sizes, strides


def _slice_backward(grad: TensorMeta, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> _Found:
    if not sizes or step < 1:
        return None
    first, last = _bounds(sizes[dim], start, end)
    wanted = list(sizes)
    wanted[dim] = -(-(last - first) // step)
    return sizes if list(grad.shape) == wanted else None


def _reduction(x: TensorMeta, dims: Sequence[int] | None = None, keep: bool = False) -> _Found:
    shape = x.shape
    if not _is_plain(x) or min(shape, default=0) <= 1:
        return None
    reduced = {dim % len(shape) for dim in dims} if dims else set(range(len(shape)))
    return [1 if dim in reduced else size for dim, size in enumerate(shape) if keep or dim not in reduced]


def _embedding(weight: TensorMeta, indices: TensorMeta, *_: Any) -> _Found:
    return (*indices.shape, weight.shape[1])


def _embedding_backward(grad: TensorMeta, indices: TensorMeta, num_weights: int, *_: Any) -> _Found:
    return (num_weights, grad.shape[-1]) if grad.shape[:-1] == indices.shape else None


def _cat(operands: Any, dim: int = 0) -> _Found:
    metas: list[Any] = [x.tensor_meta if isinstance(x, DTensorSpec) else x for x in operands]
    sizes = list(metas[0].shape)
    if not sizes or min(sizes) < 1 or not all(map(_is_plain, metas)):
        return None
    for x in metas[1:]:
        if len(x.shape) != len(sizes):
            return None
        other = list(x.shape)
        length = sizes[dim] + other[dim]
        sizes[dim] = other[dim] = length
        if other != sizes:
            return None
    return sizes


def _pad(x: TensorMeta, sides: Sequence[int], value: Any = 0) -> _Found:
    sizes = list(x.shape)
    if not _is_plain(x) or min(sides, default=-1) < 0 or len(sides) > 2 * len(sizes) or len(sides) % 2:
        return None
    for position in range(len(sides) // 2):
        sizes[-1 - position] += sides[2 * position] + sides[2 * position + 1]
    return sizes if len(sizes) not in (4, 5) or min(sizes) > 1 else None


_RULES: dict[Any, _Rule] = {
    _aten._softmax.default: _like,
    _aten._log_softmax.default: _like,
    _aten._softmax_backward_data.default: _likes,
    _aten._log_softmax_backward_data.default: _likes,
    _aten._to_copy.default: _copy,
    _aten.clone.default: _copy,
    _aten.mm.default: _mm,
    _aten.bmm.default: _bmm,
    _aten.addmm.default: _addmm,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.alias.default: _same_view,
    _aten.detach.default: _same_view,
    _aten.t.default: _t,
    _aten.transpose.int: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.slice.Tensor: _slice,
    _aten.slice_backward.default: _slice_backward,
    _aten.sum.dim_IntList: _reduction,
    _aten.mean.dim: _reduction,
    _aten.embedding.default: _embedding,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.cat.default: _cat,
    _aten.constant_pad_nd.default: _pad,
}
# What else an op takes by name and is not asked for its result's sizes.
_HARMLESS = frozenset(["dtype", "layout", "pin_memory", "non_blocking"])


def result_rule(op: Any, kwargs: dict[str, Any]) -> _Rule | None:
    """How the sizes and strides of the op's one new result are found, or None: by a run."""
    if kwargs.get("memory_format") is torch.contiguous_format and _RULES.get(op) is _copy:
        return _contiguous_copy
    if not _HARMLESS.issuperset(kwargs):
        return None
    return _RULES.get(op) or (_elementwise if torch.Tag.pointwise in op.tags else None)
