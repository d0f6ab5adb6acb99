"""Shapes, strides and dtypes of an op's results, from a run on meta tensors.

PyTorch finds them with a new ``FakeTensorMode`` per op, which takes 0.5 to 1.5 ms at each first call and for each new shape.
For the ops here, what the mode does is to call the op's meta kernel, which takes a tenth of that by itself. Forwards on meta
tensors take results from here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
