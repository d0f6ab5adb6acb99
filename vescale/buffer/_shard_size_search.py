"""The search for the smallest shard size, over all orders of the tensors.

Shard sizes fall into classes. Where a tensor contains a whole shard, its block divides the shard size; so every layout
belongs to the class of the multiples of one ``divisor``: the lcm of the alignment and of the blocks of the tensors that
contain a whole shard. Within a class, for a fixed set of such tensors, "a layout exists" is monotone in the shard size
(each shard that grows can put the extra elements at a boundary between tensors, or in front of the head of the one it
cuts), which makes a binary search valid. The smallest size over all classes is the optimum.

Three attempts share that search: a fixed order, a table over multisets (below), and best fit.
Tables are bounded by ``cap`` states each. A list whose table is larger is enclosed from both sides: *dropping* its
smallest freely divisible tensors only makes the problem easier and gives a proven bound, *bundling* tensors only makes
it harder and gives a layout. When the two meet, the layout is optimal.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vescale import csrc
from vescale.buffer._layout import earliest_start, last_end, round_up

# The planning problem in its normal form.
#
# ``tensor_alignment`` is divided out: if tensors start at multiples of A, and the shard size is a multiple, too, then
# rounding each size up to A and each block to ``lcm(block, A)``, and counting in units of A, loses nothing. Empty
# tensors are dropped. A block larger than its tensor is reduced to the tensor's size, which has the same meaning
# (never cut) and makes more tensors equal.


@dataclass(frozen=True)
class Kind:
    """Interchangeable tensors: the caller's indices of equal (numel, block)."""

    numel: int
    block: int
    tensors: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.tensors)

    @property
    def fluid(self) -> bool:
        """May be cut anywhere."""
        return self.block == 1


@dataclass(frozen=True)
class Problem:
    """Sizes in units of ``unit`` elements; ``source[i]`` is the caller's index of tensor i."""

    numels: tuple[int, ...]
    blocks: tuple[int, ...]
    num_shards: int
    alignment: int
    unit: int
    source: tuple[int, ...]

    @classmethod
    def normal(
        cls, numels: Sequence[int], blocks: Sequence[int], num_shards: int, alignment: int, tensor_alignment: int
    ) -> Problem:
        source = tuple(i for i, numel in enumerate(numels) if numel > 0)
        sizes = tuple(-(-numels[i] // tensor_alignment) for i in source)
        return cls(
            numels=sizes,
            blocks=tuple(
                min(size, math.lcm(blocks[i], tensor_alignment) // tensor_alignment)
                for i, size in zip(source, sizes, strict=True)
            ),
            num_shards=num_shards,
            alignment=math.lcm(alignment, tensor_alignment) // tensor_alignment,
            unit=tensor_alignment,
            source=source,
        )

    @cached_property
    def total(self) -> int:
        return sum(self.numels)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """In order of first appearance."""
        found: dict[tuple[int, int], list[int]] = {}
        for i, kind in enumerate(zip(self.numels, self.blocks, strict=True)):
            found.setdefault(kind, []).append(i)
        return tuple(Kind(numel, block, tuple(tensors)) for (numel, block), tensors in found.items())


# Necessary conditions of every layout of a problem, for any order. They give a proven lower bound in O(n log n).


def _threshold(numel: int, block: int) -> int:
    """The smallest shard size with which a tensor fits into one shard, or two, and contains no whole shard."""
    if numel <= block:
        return numel
    heads = {max(1, numel // (2 * block)) * block, (numel // (2 * block) + 1) * block}
    return min(numel, *(max(head, numel - head) for head in heads if head < numel))


@dataclass(frozen=True)
class _Quantum:
    """Tensors whose sizes and blocks are all multiples of ``quantum``: every shard holds a multiple of it of them."""

    quantum: int
    total: int
    others: tuple[tuple[int, int], ...]  # (numel, count) of the tensors that are not
    others_total: int


class Bounds:
    """Necessary conditions on the shard size of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        pairs = sorted((_threshold(kind.numel, kind.block), kind.block) for kind in problem.kinds)
        self._thresholds = [threshold for threshold, _ in pairs]
        # divisors[i] divides every shard size below thresholds[i]: those tensors must contain a whole shard.
        self._divisors = [problem.alignment] * (len(pairs) + 1)
        for i in range(len(pairs) - 1, -1, -1):
            self._divisors[i] = math.lcm(self._divisors[i + 1], pairs[i][1])
        self._quanta = _quanta(problem.kinds)

    def allows(self, shard: int) -> bool:
        """False when no layout with this shard size exists."""
        problem = self._problem
        if shard * problem.num_shards < problem.total:
            return False
        if shard % self._divisors[bisect_right(self._thresholds, shard)]:
            return False
        return all(self._holds(quantum, shard, shard) for quantum in self._quanta)

    def smallest(self, at_least: int = 1) -> int:
        """The smallest shard size that :meth:`allows` cannot exclude, not below ``at_least``."""
        problem = self._problem
        floor = max(at_least, -(-problem.total // problem.num_shards))
        i = bisect_right(self._thresholds, floor)
        while True:
            # Shard sizes in [floor, ceiling) must be multiples of one divisor.
            ceiling = self._thresholds[i] if i < len(self._thresholds) else None
            shard = round_up(floor, self._divisors[i])
            while ceiling is None or shard < ceiling:
                raised = max((self._raise(quantum, shard, self._divisors[i]) for quantum in self._quanta), default=0)
                if raised <= shard:
                    return shard
                shard = raised
            assert ceiling is not None
            floor, i = ceiling, bisect_right(self._thresholds, ceiling)

    def _raise(self, quantum: _Quantum, shard: int, divisor: int) -> int:
        """The smallest multiple of ``divisor`` from ``shard`` on that can hold the tensors of ``quantum``.

        The number of shards that the other tensors touch is taken at ``shard``, where it is largest: then holding is
        monotone in the size, and sizes that are skipped are truly impossible.
        """
        if self._holds(quantum, shard, shard):
            return shard
        low, step = shard, divisor
        while not self._holds(quantum, low + step, shard):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > divisor:
            middle = low + (high - low) // (2 * divisor) * divisor
            if self._holds(quantum, middle, shard):
                high = middle
            else:
                low = middle
        return high

    def _holds(self, quantum: _Quantum, shard: int, smallest: int) -> bool:
        """Whether the shards can hold the tensors of ``quantum`` beside the others, for shard sizes >= ``smallest``.

        A shard has room for ``shard // quantum`` quanta; what is left of it (``rest``) can serve only the other
        tensors, and these reach only so many shards.
        """
        problem = self._problem
        reach = min(
            problem.num_shards,
            sum(count * ((numel - 2) // smallest + 2 if numel > 1 else 1) for numel, count in quantum.others),
        )
        rest = shard % quantum.quantum
        displaced = max(0, -(-(quantum.others_total - reach * rest) // quantum.quantum))
        return quantum.total // quantum.quantum + displaced <= problem.num_shards * (shard // quantum.quantum)


def _quanta(kinds: tuple[Kind, ...]) -> list[_Quantum]:
    candidates: set[int] = set()
    quantum = 0
    for kind in sorted(kinds, key=lambda kind: -kind.block):
        own = math.gcd(kind.numel, kind.block)
        quantum = math.gcd(quantum, own)
        candidates |= {quantum, own}
        if len(candidates) > 32:  # keeps the bound O(n); any subset of the candidates gives a valid bound
            break
    found = []
    for candidate in sorted(candidates - {1}):
        inside = [kind for kind in kinds if kind.numel % candidate == 0 and kind.block % candidate == 0]
        others = [kind for kind in kinds if kind.numel % candidate or kind.block % candidate]
        found.append(
            _Quantum(
                quantum=candidate,
                total=sum(kind.numel * kind.count for kind in inside),
                others=tuple((kind.numel, kind.count) for kind in others),
                others_total=sum(kind.numel * kind.count for kind in others),
            )
        )
    return found


# The best order of tensors at one shard size, by a table over multisets. Tensors of one kind are interchangeable, and
# of a prefix of the buffer only its end matters. So for every "c_1 tensors of kind 1, c_2 of kind 2, ... are placed"
# the table holds the smallest possible end, as *slack*: the elements that may still be left empty if everything else is
# packed without a gap. A table of prod(count_i + 1) entries covers all orders. Entries without slack are dead. If
# several kinds lead to an entry, the first one is taken. The C++ helper and numpy fill the same table, so that the
# result does not depend on a compiler. If positions exceed 64 bits, Python integers are used.

MAX_POSITION = 1 << 61  # sums of two positions below it fit in int64


def num_states(counts: Sequence[int]) -> int:
    return math.prod(count + 1 for count in counts)


def best_order(
    numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    """Kinds in the order of the buffer (kind i appears counts[i] times) such that, each tensor placed as early as
    possible, the last one ends within ``limit``; None when no order does. Time and memory: O(num_states * kinds).

    Raises:
        MemoryError: there is no memory for the table.
    """
    if not counts:
        return []
    total = sum(numel * count for numel, count in zip(numels, counts, strict=True))
    if total > limit:
        return None
    if max(limit, shard, *blocks) >= MAX_POSITION:
        return _numpy(numels, blocks, counts, shard, limit - total, object)
    helper = csrc.load("planner")
    if helper is None:
        return _numpy(numels, blocks, counts, shard, limit - total, np.int64)
    return _native(helper, numels, blocks, counts, shard, limit)


def _native(
    helper: ctypes.CDLL, numels: Sequence[int], blocks: Sequence[int], counts: Sequence[int], shard: int, limit: int
) -> list[int] | None:
    sizes = ctypes.c_int64 * len(counts)
    order = (ctypes.c_int32 * sum(counts))()
    result = helper.planner_best_order(
        ctypes.c_int32(len(counts)),
        sizes(*numels),
        sizes(*blocks),
        sizes(*counts),
        ctypes.c_int64(shard),
        ctypes.c_int64(limit),
        order,
    )
    if result == -2:
        raise ValueError(
            "numbers of elements, blocks, counts, shard and limit must not be negative, and fit in 63 bits"
        )
    if result < 0:
        raise MemoryError(
            f"not enough memory for a planner table of {num_states(counts)} entries. Pass a smaller number as effort."
        )
    return list(order) if result else None


def _numpy(
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    shard: int,
    slack_at_start: int,
    dtype: type[np.int64] | type[object],
) -> list[int] | None:
    """One layer at a time: all living states with the same number of placed tensors."""
    strides = [num_states(counts[:i]) for i in range(len(counts))]
    slack: npt.NDArray = np.full(num_states(counts), -1, dtype)
    slack[0] = slack_at_start
    layer = np.zeros(1, np.int64)
    placed = np.zeros(1, dtype)
    for _ in range(sum(counts)):
        left = slack[layer]
        room = shard - (placed + slack_at_start - left) % shard
        successors, sizes = [], []
        for numel, block, count, stride in zip(numels, blocks, counts, strides, strict=True):
            remaining = left - _gaps(room, numel, block, shard, slack_at_start + 1)
            free = np.flatnonzero((layer // stride % (count + 1) < count) & (remaining >= 0))
            after = layer[free] + stride
            slack[after] = np.maximum(slack[after], remaining[free])
            successors.append(after)
            sizes.append(placed[free] + numel)
        layer, first = np.unique(np.concatenate(successors), return_index=True)
        placed = np.concatenate(sizes)[first]
        if not len(layer):
            return None
    return _walk_back(slack.tolist(), numels, blocks, counts, strides, shard)


def _gaps(room: npt.NDArray, numel: int, block: int, shard: int, too_large: int) -> npt.NDArray:
    """Elements left empty before a tensor that is placed as early as possible; ``too_large`` where it fits nowhere."""
    rest = room % block
    longest_head = shard - shard % block
    behind = room + shard - longest_head if numel - longest_head <= shard else too_large
    straight = (numel - (room - rest) <= shard) | (shard % block == 0)
    return np.where(numel <= room, 0, np.where(straight, rest, behind))


def _walk_back(
    slack: list[int],
    numels: Sequence[int],
    blocks: Sequence[int],
    counts: Sequence[int],
    strides: Sequence[int],
    shard: int,
) -> list[int]:
    left = list(counts)
    state = len(slack) - 1
    placed = sum(numel * count for numel, count in zip(numels, counts, strict=True))
    order = []
    while state:
        for i, stride in enumerate(strides):
            if left[i] and slack[state - stride] >= slack[state]:
                end = placed - numels[i] + slack[0] - slack[state - stride]
                start = earliest_start(end, numels[i], blocks[i], shard)
                if start is not None and slack[state - stride] - (start - end) == slack[state]:
                    break
        else:
            raise AssertionError("every living state has a living predecessor")
        order.append(i)
        left[i] -= 1
        placed -= numels[i]
        state -= strides[i]
    return order[::-1]


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
