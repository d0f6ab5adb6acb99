"""Patches of what PyTorch does with DTensors and with all gradients of a model; of each, why."""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _decompositions
from torch.distributed.tensor import _redistribute as tensor_redistribute
from torch.distributed.tensor._op_schema import OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops, single_dim_strategy
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode

from vescale.compat.dispatch import DISPATCHER, HANDLERS, handlers_of_dtensor
from vescale.compat.dtensor import expanded_as, local_of, make_dtensor, make_spec, own_part, spec_of
from vescale.compat.dtensor_methods import DTensorHooks
from vescale.compat.native_dispatch import native_passes
from vescale.compat.patching import Changes
from vescale.errors import DTensorStorageError, SavedPartWarning

# One order of candidates in PyTorch's searches for placements. PyTorch keeps candidates in sets. The hash of a
# ``Partial`` is that of a string, which differs between processes (unless PYTHONHASHSEED is set), and with it the
# order: where two candidates cost the same, ranks chose different ones, and called different collectives.


def search_in_one_order(changes: Changes, _: Any) -> None:
    """Candidates that are replicated come first, then shards by dim, then pending sums."""
    strategy: Any = _decompositions.DecompShardingStrategy
    candidates: Any = strategy._get_candidate_placements
    neighbors: Any = single_dim_strategy._get_neighbor_placements

    @functools.wraps(candidates)
    def get_candidate_placements(op_schema: Any) -> Any:
        return sorted(candidates(op_schema), key=_rank_of_all)

    @functools.wraps(neighbors)
    def get_neighbor_placements(shards: Any, partials: Any, *others: Any) -> Any:
        return neighbors(sorted(shards, key=_rank), sorted(partials, key=_rank), *others)

    changes.attribute(strategy, "_get_candidate_placements", staticmethod(get_candidate_placements))
    changes.function(neighbors, get_neighbor_placements)


def _rank(placement: Placement | None) -> tuple[bool, bool, str]:
    return (
        (False, False, "")
        if placement is None
        else (placement.is_partial(), not placement.is_replicate(), str(placement))
    )


def _rank_of_all(placements: Iterable[Placement | None]) -> list[tuple[bool, bool, str]]:
    return [_rank(placement) for placement in placements]


# The dims that PyTorch's sharding rules take a reduction for: an empty list of dims stands for all of them.


def reduce_all_where_none_is_named(changes: Changes, _: Any) -> None:
    """``x.amax()``, whose ``dim`` is ``()``, and ``x.sum(dim=[])`` reduce every dim. PyTorch's rules take them for
    reductions of none, and the result of each rank's part, for the result."""
    original = _math_ops._infer_reduction_dims

    @changes.in_place_of(original)
    def infer_reduction_dims(dims: Any, ndim: int) -> list[int] | None:
        is_empty = isinstance(dims, list | tuple) and not dims
        return list(range(ndim)) if is_empty else original(dims, ndim)


# Three rules of older versions.


def pad_other_dims(changes: Changes, _: Any) -> None:
    """``F.pad`` keeps what shards the dims that it does not pad; decisions are cached by the sizes, too."""
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def pad(schema: Any) -> OpStrategy:
        mesh, ndim, sizes = schema.get_mesh_from_args(validate=False), schema.args_schema[0].ndim, schema.args_schema[1]
        padded = {ndim - 1 - i // 2 for i, size in enumerate(sizes) if size}
        rules: list[Any] = [[Shard(dim), Shard(dim)] for dim in range(ndim) if dim not in padded]
        return expand_to_full_mesh_op_strategy(mesh, schema, [[Replicate(), Replicate()], *rules])

    op = torch.ops.aten.constant_pad_nd.default
    _enter(changes, "op_strategy_funcs", op, pad)
    _enter(changes, "op_to_schema_info", op, RuntimeSchemaInfo(1))


def scatter_along_whole_dims(changes: Changes, _: Any) -> None:
    """``scatter`` keeps what shards the other dims, where they have one size in all operands."""
    from torch.distributed.tensor._ops.utils import expand_to_full_mesh_op_strategy

    def scatter(schema: Any) -> OpStrategy:
        mesh, operands = schema.get_mesh_from_args(validate=False), schema.args_strategy
        ndim = operands[0].ndim
        rules: list[list[Placement | None]] = [[Replicate()] * (len(operands) + 1)]
        for dim in set(range(ndim)) - {schema.args_schema[1] % max(ndim, 1)}:
            if all(x.ndim == ndim and x.shape[dim] == operands[0].shape[dim] for x in operands):
                rules.append([Shard(dim)] * (len(operands) + 1))
        return expand_to_full_mesh_op_strategy(mesh, schema, rules, inplace_op=schema.is_inplace_op())

    aten = torch.ops.aten
    for op in (aten.scatter.src, aten.scatter.value, aten.scatter_.src, aten.scatter_.value):
        _enter(changes, "op_strategy_funcs", op, scatter)


def copy_pending_gradients(changes: Changes, _: Any) -> None:
    """What autograd copies a gradient to, ``new_empty_strided``, is pending where the gradient is."""
    from torch.distributed.tensor._op_schema import OpSpec

    op = torch.ops.aten.new_empty_strided.default
    original: Any = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[op]

    def new_empty_strided(schema: Any) -> Any:
        given = schema.args_schema[0]
        if tuple(given.shape) != tuple(schema.args_schema[1]):
            return original(schema)
        specs = [strategy.output_spec for strategy in given.strategies]
        return OpStrategy([OpSpec(spec, (spec,), [[0.0] * len(specs)]) for spec in specs])

    _enter(changes, "op_strategy_funcs", op, new_empty_strided)


def keep_order_of_strides(changes: Changes, _: Any) -> None:
    """The local tensor of ``new_empty_strided`` has the order of the whole tensor's strides, and no overlap, where the ranks
    do not divide a dim, too."""
    original = ShardingPropagator._adjust_shape_and_stride_args

    @changes.method(ShardingPropagator, "_adjust_shape_and_stride_args")
    def adjust_shape_and_stride_args(self: Any, meta: Any, schema: Any, *args: Any, **kwargs: Any) -> Any:
        found: Any = original(self, meta, schema, *args, **kwargs)
        if isinstance(self.op_to_shape_and_stride_idx[schema.op], tuple):
            given, shape, *rest = found.args_schema
            strides: Any = [1] * len(shape)
            order = sorted(range(len(shape)), key=lambda dim: meta.stride[dim], reverse=True)
            for inner, outer in itertools.pairwise(reversed(order)):
                strides[outer] = strides[inner] * shape[inner]
            found.args_schema = (given, shape, tuple(strides), *rest[1:])
        return found


def _enter(changes: Changes, table: str, op: Any, value: Any) -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    changes.entry(functools.partial(getattr, propagator, table), op, value, f"{DISPATCHER}.sharding_propagator.{table}")


# Methods and attributes of DTensors without the model's function mode, where it passes them through
# (``csrc/function_passes.h``).

# Set by other patches, which would be taken back in another order.
_OTHERS = frozenset({"data"})
_BASE = torch._C.TensorBase


class _Seen(TorchFunctionMode):
    """Remembers the function, and does not call it."""

    function: Any = None

    def __torch_function__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.function = func
        return 0


def pass_methods(changes: Changes, _: Any) -> None:
    """Put descriptors in DTensor in front of the methods and attributes of PyTorch's C++ class. Without the C++ dispatcher,
    the mode is called for all of them. What a program puts into ``torch.Tensor`` runs instead."""
    passes = native_passes()
    if passes is None:
        return
    pass_method, pass_attribute = passes
    for name in sorted({*vars(_BASE), *vars(torch.Tensor)} - {*vars(DTensor), *_OTHERS}):
        found = inspect.getattr_static(torch.Tensor, name)
        if isinstance(found, types.GetSetDescriptorType) and not name.startswith("_"):
            changes.attribute(DTensor, name, pass_attribute(torch.Tensor, found, found.__get__))
        elif isinstance(found, types.MethodDescriptorType) or name == "__getitem__":
            function = _operator(name, found) if name.startswith("_") else found
            if function is not None:
                changes.attribute(DTensor, name, pass_method(torch.Tensor, found, function))


def _operator(name: str, method: Any) -> Any:
    """The function that a mode sees where an operator runs (``mul`` of ``x * y``); None for methods that are no operators,
    and for those of the right operand: Python asks a subclass for its own first, and ``plain / x`` would be another op."""
    if not name.startswith("__") or name.startswith("__r"):
        return None
    x = torch.zeros(1)
    for args in ((x,), (x, x)):
        with _Seen() as seen:
            try:
                method(*args)
            except TypeError:  # another number of operands
                continue
        if seen.function is not None:
            return seen.function
    return None


# ``redistribute_local_tensor``, which PyTorch moves the operands of ops and the values of DTensors with.

_IS_PARTIAL = operator.methodcaller("is_partial")


def wrap_redistribute_local(changes: Changes, hooks: DTensorHooks) -> None:
    original, is_stock = tensor_redistribute.redistribute_local_tensor, hooks.custom_types.isdisjoint

    @changes.in_place_of(original)
    def redistribute_local_tensor(local_tensor: Any, current_spec: Any, target_spec: Any, **options: Any) -> Any:
        source, target = current_spec.placements, target_spec.placements
        if is_stock(map(type, source)) and is_stock(map(type, target)):
            if True in map(_IS_PARTIAL, target) and (reduced := _reduced_where_ops_differ(current_spec, target_spec)):
                local_tensor = original(local_tensor, current_spec, reduced)
                return original(local_tensor, reduced, target_spec, **options)
            try:
                found = original(local_tensor, current_spec, target_spec, **options)
                if 0 not in local_tensor.stride() or not _only_copies(source, target):
                    return found
                return expanded_as(local_tensor, found)
            except RuntimeError:
                # PyTorch does not turn a shard into a summand, which adding one to a pending gradient asks for: the
                # gradients of two microbatches may be placed differently.
                if not any(before.is_shard() and after.is_partial() for before, after in zip(source, target)):
                    raise
        return hooks.redistribute_local(
            local_tensor, current_spec, target_spec, async_op=options.get("async_op", False)
        )


def _only_copies(source: Any, target: Any) -> bool:
    return all(before == after or (before.is_replicate() and after.is_shard()) for before, after in zip(source, target))


def _reduced_where_ops_differ(source: Any, target: Any) -> Any:
    """The spec between a pending mean and a pending sum, which PyTorch does not turn into each other (``torch.cat`` of a
    loss of each kind); None: there is no such axis."""
    differ = [
        before.is_partial() and after.is_partial() and before != after
        for before, after in zip(source.placements, target.placements)
    ]
    if not any(differ):
        return None
    placements = tuple(Replicate() if differs else p for differs, p in zip(differ, source.placements))
    return type(source)(source.mesh, placements, tensor_meta=source.tensor_meta)


# Copies, pickles and storages of DTensors.


def wrap_copying(changes: Changes, _: Any) -> None:
    """``Tensor.__deepcopy__`` and ``Tensor.__reduce_ex__`` (``torch/_tensor.py``, 2.13) recognize a tensor without memory of
    its own by its address 0. A DTensor's is its local tensor's offset: if it is not 0, they fail ("invalid python storage").
    A copied parameter has no gradient, as ``Parameter.__deepcopy__``, which DTensors do not have, makes it.
    """
    deepcopy, reduce = DTensor.__deepcopy__, DTensor.__reduce_ex__

    @functools.wraps(deepcopy)
    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Any:
        is_parameter = isinstance(self, nn.Parameter)
        if id(self) in memo or not self.is_leaf or not (_is_inside(self) or (is_parameter and self.grad is not None)):
            return deepcopy(self, memo)
        aligned = _aligned(self)
        if not is_parameter:
            aligned.grad = self.grad
        copied = memo[id(self)] = deepcopy(aligned, memo)
        del memo[id(aligned)]  # which another object may get
        return copied

    @functools.wraps(reduce)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if protocol == _OF_TORCH_SAVE:
            _warn_of_part(self)
        return reduce(_aligned(self) if _is_inside(self) else self, protocol)

    for method in (__deepcopy__, __reduce_ex__):
        changes.attribute(DTensor, method.__name__, method)


def refuse_storages(changes: Changes, _: Any) -> None:
    def is_shared(self: Any) -> bool:
        return local_of(self).is_shared()

    def refusing(name: str, advice: str) -> Callable[..., NoReturn]:
        def refused(self: Any, *_: Any, **__: Any) -> NoReturn:
            raise DTensorStorageError(
                f"{name.strip('_')}() of a DTensor of shape {tuple(self.shape)} placed as {tuple(self.placements)}: "
                f"it has no memory of its own; to_local() is this rank's part. {advice}"
            )

        return refused

    changes.attribute(DTensor, "is_shared", is_shared)
    for name, advice in _NO_MEMORY.items():
        changes.attribute(DTensor, name, refusing(name, advice))


_NO_MEMORY = {
    "__dlpack__": "Pass x.to_local() to the other library, or x.full_tensor() on all ranks",
    "storage": "To write a file (safetensors), write whole tensors, x.full_tensor() on all ranks; or save with "
    "vescale.checkpoint.save, and export (`vescale ckpt export`)",
    # Of share_memory(), where the process would crash, and of FullyShardedDataParallel, which frees what it has flattened.
    "_typed_storage": "Its memory can be neither shared between processes nor freed: call "
    "x.to_local().share_memory_(); and remove FullyShardedDataParallel, because the parameters are "
    "already distributed",
}
_OF_TORCH_SAVE = 2
"""torch.save's protocol; copies, queues and process groups pickle with newer ones."""
_WARNED: list[bool] = []


def _warn_of_part(x: Any) -> None:
    """Of the first DTensor in this process of which other ranks have parts, too."""
    spec = spec_of(x)
    cut = [a for a, p in enumerate(spec.placements) if not p.is_replicate() and spec.mesh.size(a) > 1]
    if _WARNED or not cut or local_of(x).is_meta:
        return
    _WARNED.append(True)
    warnings.warn(
        SavedPartWarning(
            f"torch.save writes this rank's part {tuple(local_of(x).shape)} of a DTensor of shape {tuple(x.shape)} "
            f"placed as {spec.placements}, not the whole tensor: the file can be loaded on this rank of an equal mesh "
            "only. Save the model with vescale.checkpoint.save on all ranks (the result loads on any mesh), or save "
            'whole values: `state = {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in '
            "model.state_dict().items()}` on all ranks, then torch.save(state, ...) on one"
        ),
        stacklevel=3,
    )


def _is_inside(x: Any) -> bool:
    local = local_of(x)
    return type(x) is DTensor and type(local) is torch.Tensor and local.storage_offset() > 0 and not local.is_meta


def _aligned(x: Any) -> DTensor:
    """``x`` without its gradient, over the same memory, for ``copy.copy`` shares it: seen as a storage of its own."""
    local = local_of(x).detach()
    if _is_inside(x):
        last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride())) if local.numel() else -1
        begin, itemsize = local.storage_offset(), local.itemsize
        storage = local.untyped_storage()[begin * itemsize : (begin + last + 1) * itemsize]
        local = local.new_empty(0).set_(storage, 0, local.shape, local.stride())
    twin = make_dtensor(local, spec_of(x), requires_grad=x.requires_grad)
    twin.__dict__.update(x.__dict__)
    return twin


# What ``torch.amp.GradScaler`` asks of gradients that are DTensors.


def take_over_unscaling(changes: Changes, _: Any) -> None:
    op = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    changes.entry(handlers_of_dtensor, op, unscale, HANDLERS)


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``GradScaler.unscale_``: whether any gradient has an inf or a nan on any rank. PyTorch's reduces over the axes along
    which the first gradient of the list is cut, so that ranks may skip different steps."""
    grads, found_inf, inv_scale = args
    found = own_part(found_inf)
    op([own_part(x) for x in grads], found, own_part(inv_scale), **kwargs)
    cut: dict[Any, set[int]] = {}
    for x in grads:
        if isinstance(x, DTensor):
            axes = cut.setdefault(x.device_mesh, set())
            axes.update(axis for axis, placement in enumerate(x.placements) if not placement.is_replicate())
    for mesh, axes in cut.items():
        placements = [Partial("max") if axis in axes else Replicate() for axis in range(mesh.ndim)]
        spec = make_spec(mesh, placements, found.shape, found.stride(), found.dtype)
        if axes:
            found.copy_(make_dtensor(found.clone(), spec).full_tensor())


class OverStages(Protocol):
    """What runs in place of PyTorch's norm, and after its search for inf."""

    def concern(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether other ranks have gradients of the same model that this rank has no part of."""

    total_norm: Callable[..., torch.Tensor]

    def share_overflow(self, parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        """Set ``flags``, which are 1 where this rank's gradients overflow, to 1 if those of any stage do. Returns whether a
        parameter is one of a model in stages."""


def take_norms(changes: Changes, hooks: OverStages) -> None:
    """``clip_grad_norm_`` calls this function, whoever has imported it before."""
    original = clip_grad._get_total_norm

    @changes.in_place_of(original)
    def _get_total_norm(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        return (hooks.total_norm if hooks.concern(listed) else original)(listed, *args, **kwargs)


def share_overflows(changes: Changes, hooks: OverStages) -> None:
    """``step`` and ``unscale_`` of ``GradScaler`` call this method, for optimizers that scale by themselves, too."""
    original = GradScaler._unscale_grads_

    @changes.method(GradScaler, "_unscale_grads_")
    def _unscale_grads_(
        self: GradScaler, optimizer: Any, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        flags = found or {found_inf.device: found_inf}  # a stage without gradients has no flags
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return flags if hooks.share_overflow(parameters, list(flags.values())) else found


def take_no_parameters(changes: Changes, hooks: OverStages) -> None:
    """What requires gradients of a model may all be in other stages; a list of it is empty then, on some ranks alone."""
    original: Any = torch.optim.Optimizer.__init__

    @changes.method(torch.optim.Optimizer, "__init__")
    def __init__(self: torch.optim.Optimizer, params: Any, defaults: dict[str, Any]) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params)
            if not params and hooks.concern([]):
                params = [{"params": []}]
        original(self, params, defaults)
