"""PyTorch's search for the cheapest placements of an op's operands, with each part of it done once.

Where PyTorch has a rule for one mesh axis, it tries every combination of the rule's lines over all axes: 512 for
``mul`` of tensors with four dims on three axes. For each, it makes the specs of all operands and results, and plans how each
operand would get there. Most of these occur in many combinations. Here, a spec of an operand is made and its cost is
computed once, and specs of results are made for the cheapest combinations alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch.distributed.tensor import _collective_utils as costs
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = ["cheapest"]

Placements = tuple[Any, ...]
_Candidate = tuple[list[Placements | None], list[Placements]]
"""Placements of results, and of operands."""
_Found = tuple[list[Placements | None], list[tuple[DTensorSpec, float]]]
"""Placements of results; specs and costs of operands."""


class _Specs:
    """Makes specs of a search, in which strided shards stand for what they do in the first operand that has some."""

    def __init__(self, mesh: Any, operands: Sequence[DTensorSpec]) -> None:
        self.mesh = mesh
        self.with_orders = next(
            (spec.use_strided_shard_as_shard_order for spec in operands if _is_strided(spec.placements)), None
        )

    def make(self, placements: Placements, meta: TensorMeta | None) -> DTensorSpec:
        orders = self.with_orders if _is_strided(placements) else None
        return DTensorSpec(self.mesh, placements, tensor_meta=meta, use_strided_shard_as_shard_order=orders)


class _Operand:
    """What it would cost to move one operand to other placements."""

    def __init__(self, strategy: OpStrategy, specs: _Specs, prepared: Any) -> None:
        self.spec, self._specs, self._prepared = strategy.strategies[0].output_spec, specs, prepared
        self._found: dict[Placements, tuple[DTensorSpec, float] | None] = {}

    def to(self, placements: Placements) -> tuple[DTensorSpec, float] | None:
        """The spec and the cost; None: the operand cannot be sharded like this."""
        if placements not in self._found:
            self._found[placements] = self._to(placements)
        return self._found[placements]

    def may_be_free(self, placements: Placements) -> bool:
        """Whether the cost may be 0: on each axis that changes, the operand is replicated, or has a strided shard that does
        not stand for an order of shards, of which PyTorch does not know what it costs."""
        unknown = not self._specs.with_orders
        return all(
            before == after or before.is_replicate() or (unknown and isinstance(before, _StridedShard))
            for before, after in zip(self.spec.placements, placements)
        )

    def _to(self, placements: Placements) -> tuple[DTensorSpec, float] | None:
        spec, wanted = self.spec, self._specs.make(placements, self.spec.tensor_meta)
        stays = self._prepared.allow_uneven_sharding and spec.placements == placements
        unbacked = self._prepared.allow_unbacked_sharding
        if not stays and not utils.is_tensor_shardable(spec.shape, wanted, allow_unbacked_sharding=unbacked):
            return None
        return wanted, costs.redistribute_cost(spec, wanted)


def cheapest(mesh: Any, schema: OpSchema, prepared: Any, output_meta: Any) -> OpStrategy | None:
    """The combinations that cost least, in PyTorch's order, which then chooses among them as it would among all. None: there
    is none, or only PyTorch can tell.

    Args:
        mesh: of the op and all operands.
        schema: with strategies in place of tensors, whose placements PyTorch knows.
        prepared: PyTorch's rule of one mesh axis for this call.
        output_meta: shapes, strides and dtypes of the results.
    """
    name = schema.op.name().split("::")[1].split(".")[0]
    if name.startswith(("_foreach_", "_amp_foreach_", "_fused_")):
        return None
    strategies = (*schema.args_strategy, *schema.kwargs_strategy)
    if any(len(strategy.strategies) != 1 or not _has_sizes(strategy) for strategy in strategies):
        return None
    if not mesh._is_current_rank_part_of_mesh():
        return None  # everything is free then
    num_outputs, lines = prepared.num_outputs, prepared.expanded_strategies
    if any(placement is None for line in lines for placement in line[0 if num_outputs == 1 else num_outputs :]):
        return None
    specs = _Specs(prepared.element_mesh or mesh, [strategy.strategies[0].output_spec for strategy in strategies])
    operands = [_Operand(strategy, specs, prepared) for strategy in strategies]
    written = operands[0].spec.placements if name.endswith("_") else None
    candidates = [
        (outputs, inputs)
        for outputs, inputs in _combinations(lines, num_outputs, specs.mesh.ndim)
        if written is None or (inputs[0] == written and outputs[0] in (None, written))
    ]
    # What costs nothing is cheapest, and most often there is something: the other costs are not needed then.
    free = [pair for pair in candidates if all(map(_Operand.may_be_free, operands, pair[1]))]
    least, found = _least(free, operands)
    if least > 0:
        least, found = _least(candidates, operands)
    return OpStrategy([_op_spec(specs, outputs, moved, output_meta) for outputs, moved in found]) if found else None


def _least(candidates: Sequence[_Candidate], operands: Sequence[_Operand]) -> tuple[float, list[_Found]]:
    least = float("inf")
    found: list[_Found] = []
    for outputs, inputs in candidates:
        moved, total = [], 0.0
        for operand, placements in zip(operands, inputs):
            move = operand.to(placements)
            if move is None:
                break
            moved.append(move)
            total += move[1]
        if len(moved) < len(operands) or total > least:
            continue
        if total < least:
            least, found = total, []
        found.append((outputs, moved))
    return least, found


def _combinations(lines: Sequence[Sequence[Any]], num_outputs: int, num_axes: int) -> Iterator[_Candidate]:
    """Placements of results and of operands, in PyTorch's order, without those that mix pending sums with other pending
    reductions."""
    mixed: dict[Placements, bool] = {}
    for combination in itertools.product(lines, repeat=num_axes):
        columns: list[Any] = [None if column[0] is None else column for column in zip(*combination)]
        for column in columns:
            if column is not None and column not in mixed:
                mixed[column] = _has_mixed_partials(column)
        if not any(column is not None and mixed[column] for column in columns):
            yield columns[:num_outputs], columns[num_outputs:]


def _has_mixed_partials(placements: Placements) -> bool:
    """Whether axes have pending reductions that cannot be done in any order; sums and averages can."""
    kinds = {(type(placement), placement.reduce_op) for placement in placements if placement.is_partial()}
    if len(kinds) < 2:
        return False
    return len({kind for kind, _ in kinds}) > 1 or {op for _, op in kinds} != {"sum", "avg"}


def _op_spec(
    specs: _Specs, outputs: Sequence[Placements | None], moved: Sequence[tuple[DTensorSpec, float]], output_meta: Any
) -> OpSpec:
    results: list[DTensorSpec | None] = []
    metas = iter(output_meta or ()) if not isinstance(output_meta, TensorMeta) else itertools.repeat(output_meta)
    for placements in outputs:
        results.append(None if placements is None else specs.make(placements, next(metas, None)))
    return OpSpec(
        output_specs=tuple(results) if len(results) > 1 else results[0],
        input_specs=[spec for spec, _ in moved],
        redistribute_cost=[[cost] for _, cost in moved],
    )


def _is_strided(placements: Placements) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in placements)


def _has_sizes(strategy: OpStrategy) -> bool:
    meta = strategy.strategies[0].output_spec.tensor_meta
    return meta is not None and all(type(size) is int for size in (*meta.shape, *meta.stride))
