"""What PyTorch knows of an op on DTensors: schemas, sharding decisions, the shapes of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, _dispatch_has_kernel_for_dispatch_key
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema as OpSchema
from torch.distributed.tensor._op_schema import OutputSharding as OutputSharding
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._python_dispatch import return_and_correct_aliasing

from vescale.compat.containers import tensors_in

_aten = torch.ops.aten

# Of a tensor's value and a message: stops what a GPU runs, without a wait of the host.
assert_on_device = torch._assert_async

# Asked of a tensor and its tangent, in forward-mode differentiation.
HAS_SAME_STORAGE = _aten._has_same_storage_numel.default

# What torch.nn.utils.rnn makes a packed sequence with, and padded sequences of it.
PACKING = (torch._C._VariableFunctions._pack_padded_sequence, torch._C._VariableFunctions._pad_packed_sequence)


def native_sharding(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], schema_info: Any
) -> OutputSharding | None:
    """PyTorch's own sharding decision for stock placements, or None when it has no strategy for the op."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    try:
        return propagator.propagate_op_sharding_non_cached(OpSchema(op, args, dict(kwargs), schema_info=schema_info))
    except NotImplementedError:  # how PyTorch says that it has no strategy
        return None
    except KeyError:
        if op is torch.ops.aten.expand.default:  # its rule does not know a sharded dim of size 1 that is repeated
            return None
        raise
    except RuntimeError:
        if is_view(op):  # its rules refuse what would move: `squeeze` of a sharded dim of size 1
            return None
        raise


def schema_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpSchema:
    """The call with specs in place of DTensors."""
    found = DTensor._op_dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    assert found is not None
    return found


def output_meta(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], schema_info: Any
) -> TensorMeta | Sequence[TensorMeta | None] | None:
    """Global shape, stride and dtype of the op's results, from a run on tensors without memory."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator._propagate_tensor_meta_non_cached(OpSchema(op, args, dict(kwargs), schema_info=schema_info))


def sized_locally(op: Any, spec: DTensorSpec, sizes: Sequence[int], output_spec: DTensorSpec) -> OutputSharding:
    """The decision to run ``op(tensor, sizes)`` on the local tensor with these sizes, as PyTorch's own decisions about views
    of sharded tensors say it."""
    schema = OpSchema(op, (spec, list(sizes)), {})
    return OutputSharding(output_spec, schema, needs_redistribute=True, use_val_from_redistribute_schema=True)


def static_keywords(schema_info: Any) -> Sequence[str]:
    """The keyword arguments that the C++ cache distinguishes."""
    return (schema_info.static_kwargkey or ()) if schema_info is not None else ()


def schema_arguments(op: Any) -> tuple[tuple[str, bool], ...]:
    """``(name, whether the op writes to it)`` of each argument of the op."""
    return tuple((a.name, a.alias_info is not None and a.alias_info.is_write) for a in op._schema.arguments)


def written_tensors(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments of a call that the op writes to."""
    found: list[torch.Tensor] = []
    for position, (name, is_written) in enumerate(schema_arguments(op)):
        if is_written:
            found += tensors_in(args[position] if position < len(args) else kwargs.get(name))
    return found


def takes_only_tensors(op: Any, factors: bool = False) -> bool:
    """Whether the op has no other arguments, so that what it is called on decides all. ``factors``: but for numbers that are
    given by name (``alpha``, ``beta``)."""
    return all(
        isinstance(a.type, torch.TensorType) or (factors and a.kwarg_only and isinstance(a.type, torch.NumberType))
        for a in op._schema.arguments
    )


def has_results(op: Any) -> bool:
    return bool(op._schema.returns)


def is_view(op: Any) -> bool:
    return bool(op._schema._is_view_op())


def sizes_depend_on_values(op: Any) -> bool:
    """Whether the sizes of an op's results are known only with the values of its arguments: it says so, or PyTorch cannot
    run it without values."""
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(op.tags)
    return bool(depends) or not any(_dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in _WITHOUT_VALUES)


# Of kernels that run on the meta device.
_WITHOUT_VALUES = (
    DispatchKey.Meta,
    DispatchKey.CompositeExplicitAutograd,
    DispatchKey.CompositeExplicitAutogradNonFunctional,
    DispatchKey.CompositeImplicitAutograd,
)


def decompose(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op as its composite implementation, or NotImplemented when it has none, or one of its own (``silu_backward`` has
    both, and their results differ in the last bits)."""
    has_kernel = _dispatch_has_kernel_for_dispatch_key
    if has_kernel(op.name(), DispatchKey.CompositeImplicitAutograd) and not has_kernel(op.name(), DispatchKey.CPU):
        return op.decompose(*args, **kwargs)
    return NotImplemented


def with_aliasing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    """The result with the storage relations that the op's schema promises (views share their base's)."""
    return return_and_correct_aliasing(op, args, kwargs, result)


def observe_redistribution(source: DTensorSpec, target: DTensorSpec, op: Any) -> None:
    """Let ``ExplicitRedistributionContext`` refuse or report an implicit redistribution."""
    if getattr(ExplicitRedistributionContext._local, "_active", None) is not None:
        message: Any = f"implicit redistribution in {op}: {source} -> {target}"
        ExplicitRedistributionContext.observe_redistribution(source, target, message)


def iterate_specs(args: Any) -> Iterator[DTensorSpec]:
    """The specs among arguments, in order; tensor lists may be nested one level."""
    for arg in args:
        if isinstance(arg, DTensorSpec):
            yield arg
        elif isinstance(arg, list | tuple):
            for item in arg:
                if isinstance(item, DTensorSpec):
                    yield item
