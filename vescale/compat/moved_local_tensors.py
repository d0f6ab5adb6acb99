"""``redistribute_local_tensor``, which PyTorch moves the operands of ops and the values of DTensors with."""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch.distributed.tensor import Replicate
from torch.distributed.tensor import _redistribute as tensor_redistribute

from vescale.compat.dtensor import expanded_as
from vescale.compat.dtensor_methods import DTensorHooks
from vescale.compat.patching import Changes

__all__ = ["wrap_redistribute_local"]

_IS_PARTIAL = operator.methodcaller("is_partial")


def wrap_redistribute_local(changes: Changes, hooks: DTensorHooks) -> None:
    original, is_stock = tensor_redistribute.redistribute_local_tensor, hooks.custom_types.isdisjoint

    @functools.wraps(original)
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
                if not _becomes_summand(source, target):
                    raise
        return hooks.redistribute_local(
            local_tensor, current_spec, target_spec, async_op=options.get("async_op", False)
        )

    changes.function(original, redistribute_local_tensor)


def _only_copies(source: Any, target: Any) -> bool:
    return all(before == after or (before.is_replicate() and after.is_shard()) for before, after in zip(source, target))


def _becomes_summand(source: Any, target: Any) -> bool:
    return any(before.is_shard() and after.is_partial() for before, after in zip(source, target))


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
