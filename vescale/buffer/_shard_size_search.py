"""The search for the smallest shard size, over all orders of the tensors.

Shard sizes fall into classes. Where a tensor contains a whole shard, its block divides the shard size; so every layout
belongs to the class of the multiples of one ``divisor``: the lcm of the alignment and of the blocks of the tensors that
contain a whole shard. Within a class, for a fixed set of such tensors, "a layout exists" is monotone in the shard size
(each shard that grows can put the extra elements at a boundary between tensors, or in front of the head of the one it
cuts), which makes a binary search valid. The smallest size over all classes is the optimum.

Three attempts share that search: a fixed order, a table over multisets (:mod:`vescale.buffer._order_table`), and best fit.
Tables are bounded by ``cap`` states each. A list whose table is larger is enclosed from both sides: *dropping* its
smallest freely divisible tensors only makes the problem easier and gives a proven bound, *bundling* tensors only makes
it harder and gives a layout. When the two meet, the layout is optimal.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vescale.buffer._lower_bounds import Bounds
from vescale.buffer._offsets import earliest_start, last_end, round_up
from vescale.buffer._order_table import MAX_POSITION, best_order, num_states
from vescale.buffer._planning_problem import Problem

__all__ = ["Found", "search"]

MAX_DIVISORS = 4096
FREE_STATES = 4096  # smaller tables are not counted as work: lists of up to 12 tensors are always solved exactly
_SLOW_CAP = 10_000  # of tables in Python integers
TABLES_FROM_BELOW = 16  # of ``cap`` states each: the work of the search with fluid tensors dropped
TABLES_FROM_ABOVE = 8  # likewise, of the search with tensors bundled
BEST_FIT_STEPS = 3_000_000  # pairs (position, candidate tensor) that best fit may look at in one plan

Order = list[int]
Attempt = Callable[[int], Order | None]  # shard size -> tensors in buffer order, or None when they do not fit


@dataclass(frozen=True)
class Found:
    """A solved problem: tensors in the order of the buffer, each placed as early as possible."""

    shard: int
    order: tuple[int, ...]
    lower_bound: int
    strategy: str


class _Best:
    """The best layout so far."""

    def __init__(self, problem: Problem) -> None:
        self.shard = round_up(problem.total, problem.alignment)  # everything in one shard: always legal
        self.order: Sequence[int] = range(len(problem.numels))
        self.strategy = "default"

    def improve(self, strategy: str, shard: int, order: Sequence[int]) -> None:
        assert shard < self.shard
        self.shard, self.order, self.strategy = shard, order, strategy


class _OutOfWork(Exception):
    pass


class _Work:
    """A budget that does not depend on the clock: every rank stops at the same place."""

    def __init__(self, amount: int) -> None:
        self._left = amount

    def spend(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise _OutOfWork


def search(problem: Problem, order: str, cap: int) -> Found:
    """Solve ``problem``: by the paper's algorithm for ``order="default"``, over all orders for ``"auto"``."""
    bounds = Bounds(problem)
    lower = bounds.smallest()
    best = _Best(problem)
    for strategy, tensors in _orders(problem, order):
        _smallest_shard(
            _in_order(problem, bounds, tensors),
            functools.partial(best.improve, strategy),
            _prefix_divisors(problem, lower, best.shard),
            _quantum(problem),
            lower,
            best.shard,
        )
        if best.shard == lower:
            break
    if order == "auto" and best.shard > lower:
        divisors = _all_divisors(problem, lower, best.shard)
        if divisors is not None:
            lower = _search_tables(problem, bounds, divisors, cap, lower, best)
        if best.shard > lower:
            _search_best_fit(problem, bounds, lower, best)
    return Found(best.shard, tuple(best.order), lower, best.strategy)


def _smallest_shard(
    attempt: Attempt,
    improve: Callable[[int, Order], None],
    divisors: Iterable[int],
    quantum: int,
    at_least: int,
    below: int,
) -> int:
    """Search [at_least, below) for the smallest shard size where ``attempt`` succeeds.

    ``improve`` is told of every success, each smaller than the one before. Returns the smallest size that is not
    excluded: that of the last success, or ``below`` when there was none; less where the work ran out before.

    Shard sizes of good layouts are often multiples of ``quantum``, the unit that the sizes of most tensors share: these
    are searched first, and the neighbour below the best of them is tried before the rest.
    """
    open_from = {divisor: round_up(at_least, divisor) for divisor in divisors}  # smaller multiples are excluded

    def succeeds(shard: int) -> bool:
        nonlocal below
        found = attempt(shard)
        if found is not None:
            below = shard
            improve(shard, found)
        return found is not None

    with contextlib.suppress(_OutOfWork):
        for divisor, low in open_from.items():
            if low >= below or succeeds(low):
                continue
            open_from[divisor] = low + divisor
            high = round_up(below, divisor)
            for step, neighbour_first in ((math.lcm(divisor, quantum), False), (divisor, True)):
                # Multiples of `step` up to `failed` are too small; those from `good` on are no improvement.
                failed, good, jump = low // step, -(-high // step), 1
                while good - failed > 1:
                    if neighbour_first:
                        probe, neighbour_first = good - 1, False
                    else:
                        probe = failed + min(jump, (good - failed) // 2)
                        jump *= 4
                    if succeeds(probe * step):
                        good = probe
                    else:
                        failed = probe
                        low = max(low, probe * step)
                        open_from[divisor] = low + divisor
                high = min(high, good * step)
            open_from[divisor] = high
    return min([below, *open_from.values()])


def _prefix_divisors(problem: Problem, lower: int, below: int) -> list[int]:
    """The paper's candidates: the largest tensors contain whole shards, for every prefix by decreasing size."""
    divisor = problem.alignment
    divisors = {divisor}
    for kind in sorted(problem.kinds, key=lambda kind: -kind.numel):
        divisor = math.lcm(divisor, kind.block)
        if kind.numel < lower or divisor >= below:
            break
        divisors.add(divisor)
    return sorted(divisors)


def _all_divisors(problem: Problem, lower: int, below: int) -> list[int] | None:
    """Every class that can improve on ``below``; None when there are too many."""
    divisors = {problem.alignment}
    for block in sorted({kind.block for kind in problem.kinds if kind.numel >= lower}):
        divisors |= {lcm for divisor in divisors if (lcm := math.lcm(divisor, block)) < below}
        if len(divisors) > MAX_DIVISORS:
            return None
    return sorted(divisors)


def _quantum(problem: Problem) -> int:
    return math.gcd(*(size for kind in problem.kinds if not kind.fluid for size in (kind.numel, kind.block))) or 1


# Fixed orders ---------------------------------------------------------------------------------------------------------


def _orders(problem: Problem, order: str) -> Iterable[tuple[str, Sequence[int]]]:
    numels, blocks = problem.numels, problem.blocks
    tensors = range(len(numels))
    yield "default", tensors
    if order == "auto":
        yield "order:block", sorted(tensors, key=lambda i: (-blocks[i], -numels[i]))
        yield "order:size", sorted(tensors, key=lambda i: (-numels[i], -blocks[i]))
        yield "order:block-ascending", sorted(tensors, key=lambda i: (blocks[i], numels[i]))


def _in_order(problem: Problem, bounds: Bounds, order: Sequence[int]) -> Attempt:
    def attempt(shard: int) -> Order | None:
        if not bounds.allows(shard):
            return None
        end = last_end(problem.numels, problem.blocks, order, shard, shard * problem.num_shards)
        return None if end is None else list(order)

    return attempt


# Tables over multisets ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Parcel:
    """A run of tensors that a table moves as one; ``content`` lists (kind, how many) from front to back."""

    numel: int
    block: int
    count: int
    content: tuple[tuple[int, int], ...]

    def bundled(self, size: int) -> list[_Parcel]:
        """``size`` neighbours at a time; a run of equal tensors of whole blocks is one tensor of these blocks."""
        if size == 1 or self.block == 1 or self.numel % self.block or self.count < 2 * size:
            return [self]
        content = tuple((kind, number * size) for kind, number in self.content)
        bundles = _Parcel(self.numel * size, self.block, self.count // size, content)
        rest = self.count % size
        return [bundles, _Parcel(self.numel, self.block, rest, self.content)] if rest else [bundles]


def _chain(parcels: Sequence[_Parcel]) -> _Parcel:
    """Fluid parcels, all in a row: one fluid tensor."""
    content = tuple((kind, number * p.count) for p in parcels for kind, number in p.content)
    return _Parcel(sum(p.numel * p.count for p in parcels), 1, 1, content)


def _states(parcels: Sequence[_Parcel]) -> int:
    return num_states([p.count for p in parcels])


def _search_tables(problem: Problem, bounds: Bounds, divisors: Sequence[int], cap: int, lower: int, best: _Best) -> int:
    """Improve ``best``; returns the raised lower bound."""
    singles = [_Parcel(kind.numel, kind.block, kind.count, ((i, 1),)) for i, kind in enumerate(problem.kinds)]
    solid = sorted((p for p in singles if p.block > 1), key=lambda p: (-p.block, -p.numel))
    fluid = sorted((p for p in singles if p.block == 1), key=lambda p: -p.numel)
    quantum = _quantum(problem)
    if best.shard * problem.num_shards >= MAX_POSITION:
        cap = min(cap, _SLOW_CAP)

    # From below: without the smallest fluid tensors. Without any fluid tensor left out, this is the optimum.
    kept = len(fluid)
    while kept and _states(solid + fluid[:kept]) > cap:
        kept -= 1
    if _states(solid + fluid[:kept]) <= cap:
        exact = kept == len(fluid)
        attempt = _by_tables(problem, bounds, [solid + fluid[:kept]], _Work(TABLES_FROM_BELOW * cap))

        def improve(shard: int, order: Order) -> None:
            if exact:
                best.improve("table", shard, order)

        lower = _smallest_shard(attempt, improve, divisors, quantum, lower, best.shard)

    # From above: all tensors, some of them tied together, in tables of a third of the size (they are tried more often).
    easier = [variant for variant in (_bundles(solid, fluid, cap // 3), _chains(solid, fluid, cap // 3)) if variant]
    if easier and best.shard > lower:
        attempt = _by_tables(problem, bounds, easier, _Work(TABLES_FROM_ABOVE * cap))
        _smallest_shard(
            attempt,
            functools.partial(best.improve, "table:bundled"),
            divisors,
            quantum,
            lower,
            best.shard,
        )
    return lower


def _bundles(solid: Sequence[_Parcel], fluid: Sequence[_Parcel], cap: int) -> list[_Parcel] | None:
    """Every fluid tensor by itself, the others in bundles of equal tensors, as small as the cap allows."""
    for size in (1, 2, 4, 8, 16, 32, 64, 128):
        parcels = [bundle for parcel in solid for bundle in parcel.bundled(size)] + list(fluid)
        if _states(parcels) <= cap:
            return parcels
    return None


def _chains(solid: Sequence[_Parcel], fluid: Sequence[_Parcel], cap: int) -> list[_Parcel] | None:
    """Every other tensor by itself, the smallest fluid ones in one chain, as short as the cap allows."""
    for kept in range(len(fluid) - 1, -1, -1):
        parcels = [*solid, *fluid[:kept], _chain(fluid[kept:])]
        if _states(parcels) <= cap:
            return parcels
    return None


def _by_tables(problem: Problem, bounds: Bounds, variants: Sequence[Sequence[_Parcel]], work: _Work) -> Attempt:
    """The first of ``variants`` that fits; all of them describe the same tensors, or a part of them."""

    def attempt(shard: int) -> Order | None:
        if not bounds.allows(shard):
            return None
        for parcels in variants:
            states = _states(parcels)
            work.spend(states if states > FREE_STATES else 0)
            order = best_order(
                [p.numel for p in parcels],
                [p.block for p in parcels],
                [p.count for p in parcels],
                shard,
                shard * problem.num_shards,
            )
            if order is not None:
                return _unpacked(problem, [parcels[i] for i in order])
        return None

    return attempt


def _unpacked(problem: Problem, parcels: Iterable[_Parcel]) -> Order:
    tensors = [iter(kind.tensors) for kind in problem.kinds]
    return [next(tensors[kind]) for p in parcels for kind, number in p.content for _ in range(number)]


# Best fit -------------------------------------------------------------------------------------------------------------


def _search_best_fit(problem: Problem, bounds: Bounds, lower: int, best: _Best) -> None:
    """For lists with too many kinds for any table."""
    work = _Work(BEST_FIT_STEPS)

    def attempt(shard: int) -> Order | None:
        return _best_fit(problem, shard, work) if bounds.allows(shard) else None

    _smallest_shard(
        attempt,
        functools.partial(best.improve, "best-fit"),
        _prefix_divisors(problem, lower, best.shard),
        _quantum(problem),
        lower,
        best.shard,
    )


def _best_fit(problem: Problem, shard: int, work: _Work) -> Order | None:
    """Next comes the tensor that leaves the smallest gap, large blocks first; fluid tensors are kept to fill gaps."""
    kinds = problem.kinds
    left = [list(reversed(kind.tensors)) for kind in kinds]
    solid = sorted((i for i, k in enumerate(kinds) if not k.fluid), key=lambda i: (-kinds[i].block, -kinds[i].numel))
    fluid = sorted((i for i, k in enumerate(kinds) if k.fluid), key=lambda i: -kinds[i].numel)
    order: Order = []
    end = 0
    while solid:
        work.spend(len(solid))
        chosen, chosen_start = -1, 0
        for i in solid:
            start = earliest_start(end, kinds[i].numel, kinds[i].block, shard)
            if start is None:
                return None
            if chosen < 0 or start < chosen_start:
                chosen, chosen_start = i, start
                if start == end:
                    break
        filler = next((i for i in fluid if kinds[i].numel <= chosen_start - end), None)
        if filler is not None:
            chosen, chosen_start = filler, end
        order.append(left[chosen].pop())
        end = chosen_start + kinds[chosen].numel
        if not left[chosen]:
            (solid if filler is None else fluid).remove(chosen)
    order += [tensor for i in fluid for tensor in reversed(left[i])]
    end += sum(kinds[i].numel * len(left[i]) for i in fluid)
    return order if end <= shard * problem.num_shards else None
