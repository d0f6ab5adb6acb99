"""Sharding decisions for operands that an op takes as they are placed, without a search.

Where PyTorch has a rule for one mesh axis, it tries every combination of the rule's lines over all axes and computes
what each costs. That takes 0.7 s for one op on three axes, and as long on two if views have left strided shards. If the
operands' placements match a line of the rule on each axis, the combination of these lines costs nothing, and the search
ends with it. It is looked up here. Otherwise, the search is done with less work (:mod:`vescale.compat.placement_search`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _sharding_prop as sharding_propagation
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.compat.patching import Changes
from vescale.compat.placement_search import cheapest

try:
    from torch.distributed.tensor._ops.single_dim_strategy import _PreparedSingleDimStrategy
except ImportError:  # this torch has its rules in another form; the patch is not installed
    _PreparedSingleDimStrategy = None  # type: ignore[assignment,misc]

__all__ = ["exact_match", "search", "search_only_mismatches"]

_STOCK = (Replicate, Shard, _StridedShard, Partial)


def search_only_mismatches(changes: Changes, _: Any) -> None:
    """Let PyTorch search only where :func:`exact_match` and :func:`search` find nothing."""
    expand: Callable[..., Any] = sharding_propagation._expand_single_dim_strategy_to_mesh

    @functools.wraps(expand)
    def expand_single_dim_strategy_to_mesh(mesh: Any, schema: OpSchema, rule: Any, output_meta: Any) -> Any:
        found = exact_match(mesh, schema, rule, output_meta) or search(mesh, schema, rule, output_meta)
        if found is None:
            return expand(mesh, schema, rule, output_meta)
        return lambda op, args, kwargs: found

    changes.function(expand, expand_single_dim_strategy_to_mesh)


def exact_match(mesh: Any, schema: OpSchema, rule: Any, output_meta: Any) -> OpStrategy | None:
    """The strategy under which no operand of ``schema`` moves; None: there is none, or only the search can tell.

    Args:
        mesh: of the op.
        schema: with strategies in place of tensors.
        rule: PyTorch's description of the op on one mesh axis.
        output_meta: shapes, strides and dtypes of the results.
    """
    specs = _stock_specs(mesh, schema, rule)
    if specs is None or any(_is_strided(spec) and spec.use_strided_shard_as_shard_order for spec in specs):
        return None  # the strides stand for an order of shards
    prepared = _PreparedSingleDimStrategy(rule, schema, output_meta)
    if prepared.num_inputs != len(specs) or prepared.num_outputs == 0 or not _is_function(prepared):
        return None
    strategy = prepared.try_propagate(mesh, tuple(spec.placements for spec in specs), specs)
    if strategy is None and 1 in mesh.shape and mesh.ndim > 2 and any(map(_is_strided, specs)):
        strategy = _match_beside_trivial_axes(mesh, prepared, specs)
    if strategy is None:
        return None
    outputs = strategy.strategies[0].output_specs
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    if any(_has_mixed_partials(spec.placements) for spec in (*specs, *results) if spec is not None):
        return None
    if schema.is_inplace_op() and results[0] is not None and results[0].placements != specs[0].placements:
        return None
    if any(_is_strided(spec) for spec in specs):
        return _with_cuts_as_they_are(strategy)
    return strategy


def search(mesh: Any, schema: OpSchema, rule: Any, output_meta: Any) -> OpStrategy | None:
    """The cheapest strategies, with the arguments of :func:`exact_match`; None: only PyTorch can tell."""
    specs = _stock_specs(mesh, schema, rule)
    if specs is None:
        return None
    prepared = _PreparedSingleDimStrategy(rule, schema, output_meta)
    if prepared.num_inputs != len(specs) or prepared.num_outputs == 0:
        return None
    return cheapest(mesh, schema, prepared, output_meta)


def _stock_specs(mesh: Any, schema: OpSchema, rule: Any) -> list[DTensorSpec] | None:
    """Specs of all operands; None if some are not on ``mesh``, or placed as PyTorch does not know."""
    if schema.is_out_variant_op() or getattr(rule, "different_mesh_args", None):
        return None
    operands = (*schema.args_strategy, *schema.kwargs_strategy)
    if not operands or not all(isinstance(operand, OpStrategy) for operand in operands):
        return None
    specs = [operand.strategies[0].output_spec for operand in operands]
    if any(spec.mesh != mesh or type(p) not in _STOCK for spec in specs for p in spec.placements):
        return None
    return specs


def _match_beside_trivial_axes(
    mesh: Any, prepared: _PreparedSingleDimStrategy, specs: Sequence[DTensorSpec]
) -> OpStrategy | None:
    """The match of operands as if they were Replicate on axes of size 1, where all placements are the same. For meshes on
    which the search would take minutes."""
    plain = [
        DTensorSpec(
            mesh,
            tuple(Replicate() if size == 1 else p for size, p in zip(mesh.shape, spec.placements)),
            tensor_meta=spec.tensor_meta,
            use_strided_shard_as_shard_order=spec.use_strided_shard_as_shard_order,
        )
        for spec in specs
    ]
    strategy: OpStrategy | None = prepared.try_propagate(mesh, tuple(spec.placements for spec in plain), plain)
    if strategy is not None:
        strategy.strategies[0].input_specs = list(specs)  # nothing moves
    return strategy


def _with_cuts_as_they_are(strategy: OpStrategy) -> OpStrategy:
    """``strategy`` with specs whose strided shards do not stand for an order of shards, like those of its operands."""
    (found,) = strategy.strategies
    outputs = found.output_specs
    found.output_specs = tuple(map(_plain, outputs)) if isinstance(outputs, tuple) else _plain(outputs)
    found.input_specs = [spec for spec in map(_plain, found.input_specs or ()) if spec is not None]
    return strategy


def _plain(spec: DTensorSpec | None) -> DTensorSpec | None:
    if spec is None or not _is_strided(spec):
        return spec
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=spec.tensor_meta, use_strided_shard_as_shard_order=False)


def _is_function(prepared: _PreparedSingleDimStrategy) -> bool:
    """Whether each combination of input placements has one combination of output placements."""
    outputs, found = prepared.num_outputs, prepared.strategy_lookup
    return all(found[tuple(line[outputs:])] == tuple(line[:outputs]) for line in prepared.expanded_strategies)


def _is_strided(spec: DTensorSpec) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in spec.placements)


def _has_mixed_partials(placements: Sequence[Any]) -> bool:
    return len({(type(placement), placement.reduce_op) for placement in placements if placement.is_partial()}) > 1
