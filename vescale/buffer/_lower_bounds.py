"""Necessary conditions of every layout of a problem, for any order. They give a proven lower bound in O(n log n)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from vescale.buffer._offsets import round_up
from vescale.buffer._planning_problem import Kind, Problem

__all__ = ["Bounds"]


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
