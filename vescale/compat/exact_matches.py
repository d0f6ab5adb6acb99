"""PyTorch's search for the placements of an op's operands, asked for few candidates.

Where PyTorch has a rule for one mesh axis, it makes every combination of the rule's lines over all axes, refuses those that
the op cannot do, and computes what each of the others costs: 512 combinations for ``mul`` of tensors with four dims on three
axes, 0.7 s. Then it takes one that moves nothing; else the first that costs nothing; else the first of the cheapest. It
judges each combination by itself.

Here, PyTorch's function gets the combinations in the order in which it would prefer them, until it accepts one. What it
refuses, and what it makes of a combination, is its own in each version. A call that it may judge by more than is known here
goes to the whole search.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.tensor import _collective_utils as costs
from torch.distributed.tensor import _sharding_prop as sharding_propagation
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.compat.patching import Changes

Placements = tuple[Any, ...]
Line = Sequence[Any]
"""Placements of the results and of the operands on one axis."""
_Pair = tuple[Line, Placements]
"""A line, and the placements of the operands in it."""

# What PyTorch's function is given beside candidates. None of it changes costs, or judges several candidates together.
_KNOWN = frozenset(
    {
        "output_tensor_meta",
        "input_index",
        "inplace_op",
        "allow_unbacked_sharding",
        "allow_uneven_sharding",
        "is_valid_strategy_cb",  # until 2.13
        "full_mesh_strategy_filter",  # since 2.14
        "different_mesh_args",
    }
)
_SEARCH = threading.local()


def search_only_mismatches(changes: Changes, _: Any) -> None:
    """Let PyTorch's search for placements judge few candidates."""
    expand: Callable[..., Any] = sharding_propagation._expand_single_dim_strategy_to_mesh
    judge: Callable[..., OpStrategy] = utils.expand_to_full_mesh_op_strategy

    @functools.wraps(expand)
    def expand_single_dim_strategy_to_mesh(mesh: Any, schema: OpSchema, *others: Any) -> Any:
        find = expand(mesh, schema, *others)

        def find_among_few(*call: Any) -> Any:
            _SEARCH.schema = schema
            try:
                return find(*call)
            finally:
                _SEARCH.schema = None

        return find_among_few

    @functools.wraps(judge)
    def expand_to_full_mesh_op_strategy(
        mesh: Any, schema: OpSchema, lines: Sequence[Line], **others: Any
    ) -> OpStrategy:
        # Only the search itself: other callers may judge all candidates, and so does PyTorch for elements of lists.
        found = ask_for_few(judge, mesh, schema, lines, others) if schema is getattr(_SEARCH, "schema", None) else None
        return judge(mesh, schema, lines, **others) if found is None else found

    changes.function(expand, expand_single_dim_strategy_to_mesh)
    changes.function(judge, expand_to_full_mesh_op_strategy)


class _LinesByAxis(list[Line]):
    """Lines of a rule, of which each axis has its own: PyTorch makes the product of ``[lines] * mesh.ndim``."""

    def __init__(self, by_axis: Sequence[Sequence[Line]]) -> None:
        super().__init__(line for lines in by_axis for line in lines)
        self.left = list(reversed(by_axis))

    def __iter__(self) -> Iterator[Line]:
        return iter(self.left.pop())


def ask_for_few(
    judge: Callable[..., OpStrategy], mesh: Any, schema: OpSchema, lines: Sequence[Line], others: dict[str, Any]
) -> OpStrategy | None:
    """The strategies among which PyTorch chooses as it would among all; None: only the whole search can tell.

    Args:
        judge: PyTorch's function, which returns a strategy for each combination of lines that it accepts.
        mesh: of the op.
        schema: with strategies in place of tensors.
        lines: of PyTorch's rule for one axis.
        others: arguments of ``judge``.
    """
    operands = schema.args_strategy
    if (
        not others.keys() <= _KNOWN
        or schema.kwargs_strategy
        or not operands
        or not mesh._is_current_rank_part_of_mesh()
    ):
        return None  # where a rank is not part of the mesh, everything is free
    if any(len(operand.strategies) != 1 for operand in operands):
        return None
    specs = [operand.strategies[0].output_spec for operand in operands]
    if not all(spec.mesh == mesh and _has_sizes(spec) for spec in specs):
        return None
    first = others.get("input_index", 1)
    wanted = [tuple(placement for placement in line[first:] if placement is not None) for line in lines]
    if any(len(placements) != len(specs) for placements in wanted):
        return None
    by_axis = list(zip(*(spec.placements for spec in specs)))
    pairs = list(zip(lines, wanted))
    ask = functools.partial(_ask, judge, mesh, schema, others)
    try:
        stay = [[line for line, after in pairs if after == before] for before in by_axis]
        found = ask(stay) if all(stay) else None
        if found is not None and _cost_of(found) == 0:
            return found
        moves = _Moves(mesh, specs, others)
        for cost, combination in _cheapest_first(moves, pairs, by_axis):
            found = ask([[line] for line, _ in combination])
            if found is not None:
                return found if _cost_of(found) == cost else None
    except IndexError:  # PyTorch's function asks for lines otherwise than it did in the versions that are known
        pass
    return None


def _ask(
    judge: Callable[..., OpStrategy], mesh: Any, schema: OpSchema, others: Any, by_axis: Sequence[Sequence[Line]]
) -> OpStrategy | None:
    """What PyTorch makes of the combinations of these lines; None if it refuses them all.

    Raises IndexError where it asks for the lines of more axes than there are, or of fewer.
    """
    lines = _LinesByAxis(by_axis)
    try:
        found = judge(mesh, schema, lines, **others)
    except RuntimeError:  # the whole search raises it for all
        return None
    if lines.left:
        raise IndexError
    return found if found.strategies else None


def _cost_of(found: OpStrategy) -> float:
    rows = found.strategies[0].redistribute_cost or ()
    return sum(itertools.chain.from_iterable(rows))


def _cheapest_first(
    moves: _Moves, pairs: Sequence[_Pair], by_axis: Sequence[Placements]
) -> Iterator[tuple[float, Sequence[_Pair]]]:
    """Combinations with what they cost, in PyTorch's order where they cost the same."""
    # Nothing else is free. Most often one of these is taken, and the costs of the others are not needed.
    free = [[pair for pair in pairs if _may_be_free(before, pair[1])] for before in by_axis]
    for combination in itertools.product(*free):
        if moves.cost(combination) == 0:
            yield 0, combination
    costly = ((moves.cost(combination), combination) for combination in itertools.product(pairs, repeat=len(by_axis)))
    yield from sorted(((cost, found) for cost, found in costly if cost), key=operator.itemgetter(0))


def _may_be_free(before: Placements, after: Placements) -> bool:
    """Whether the cost may be 0: each operand that changes is replicated on the axis, or has a strided shard."""
    return all(a == b or a.is_replicate() or isinstance(a, _StridedShard) for a, b in zip(before, after))


class _Moves:
    """What it costs to move operands, each computed once."""

    def __init__(self, mesh: Any, specs: Sequence[DTensorSpec], others: dict[str, Any]) -> None:
        self._mesh, self._specs = mesh, specs
        self._uneven = others.get("allow_uneven_sharding", False)
        self._unbacked = others.get("allow_unbacked_sharding")
        # Strided shards stand for what they do in the first operand that has some.
        self._orders = next(
            (spec.use_strided_shard_as_shard_order for spec in specs if _is_strided(spec.placements)), None
        )
        self._costs: list[dict[Placements, float | None]] = [{} for _ in specs]

    def cost(self, combination: Sequence[_Pair]) -> float | None:
        """The sum; None if an operand cannot be sharded like this, or moved there."""
        total = 0.0
        for known, spec, placements in zip(self._costs, self._specs, zip(*[after for _, after in combination])):
            if placements not in known:
                known[placements] = self._move(spec, placements)
            cost = known[placements]
            if cost is None:
                return None
            total += cost
        return total

    def _move(self, spec: DTensorSpec, placements: Placements) -> float | None:
        orders = self._orders if _is_strided(placements) else None
        target = DTensorSpec(
            self._mesh, placements, tensor_meta=spec.tensor_meta, use_strided_shard_as_shard_order=orders
        )
        stays = self._uneven and spec.placements == placements
        if not stays and not utils.is_tensor_shardable(spec.shape, target, allow_unbacked_sharding=self._unbacked):
            return None
        try:
            return costs.redistribute_cost(spec, target)
        except AssertionError:  # PyTorch plans no way there; it may not ask, because it refuses the combination
            return None


def _is_strided(placements: Placements) -> bool:
    return any(isinstance(placement, _StridedShard) for placement in placements)


def _has_sizes(spec: DTensorSpec) -> bool:
    meta = spec.tensor_meta
    return meta is not None and all(type(size) is int for size in (*meta.shape, *meta.stride))
