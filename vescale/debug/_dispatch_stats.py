"""What ran the ops on DTensors, and what it cost to decide that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vescale.compat import dispatch_counts, is_native, reset_dispatch_counts

__all__ = ["DispatchStats", "OpDispatch", "dispatch_stats"]

_NUM_ROWS = 20


@dataclass(frozen=True)
class OpDispatch:
    """The calls of one op on DTensors.

    Attributes:
        op: its name in ATen, with the overload.
        hits: calls that C++ ran on the local tensors.
        misses: calls for which it was decided what runs.
        miss_seconds: the time that these decisions took.
        fallbacks: calls that took PyTorch's path, by reason.
        fallback_seconds: the time that they took in all, the op included.
    """

    op: str
    hits: int
    misses: int
    miss_seconds: float
    fallbacks: Mapping[str, int]
    fallback_seconds: float


@dataclass(frozen=True)
class DispatchStats:
    """What :func:`dispatch_stats` returns; ``print`` it for a table, the most expensive ops first.

    Attributes:
        is_native: whether the C++ dispatcher is installed; without it nothing is counted.
        ops: one entry for each op that was called.
    """

    is_native: bool
    ops: tuple[OpDispatch, ...]

    @property
    def hits(self) -> int:
        return sum(op.hits for op in self.ops)

    @property
    def misses(self) -> int:
        return sum(op.misses for op in self.ops)

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Calls of all ops that took PyTorch's path, by reason."""
        found: Counter[str] = Counter()
        for op in self.ops:
            found.update(op.fallbacks)
        return MappingProxyType(dict(found))

    def __str__(self) -> str:
        if not self.is_native:
            return "ops on DTensors: PyTorch's path runs all of them (the C++ dispatcher is not installed)"
        total = sum(self.fallbacks.values())
        lines = [f"ops on DTensors: {self.hits} in C++, {self.misses} decided anew, {total} by PyTorch's path"]
        lines.append(f"{'op':36} {'C++':>8} {'decided':>8} {'us each':>8} {'PyTorch':>8} {'us each':>8}  why")
        costly = sorted(self.ops, key=lambda op: -(op.miss_seconds + op.fallback_seconds))
        for op in costly[:_NUM_ROWS]:
            calls = sum(op.fallbacks.values())
            lines.append(
                f"{op.op.removeprefix('aten::'):36} {op.hits:8} {op.misses:8} {_each(op.miss_seconds, op.misses):>8} "
                f"{calls:8} {_each(op.fallback_seconds, calls):>8}  {', '.join(op.fallbacks)}".rstrip()
            )
        if len(costly) > _NUM_ROWS:
            lines.append(f"... and {len(costly) - _NUM_ROWS} ops that cost less")
        return "\n".join(lines)


def _each(seconds: float, calls: int) -> str:
    return f"{seconds / calls * 1e6:.1f}" if calls else ""


def dispatch_stats(*, reset: bool = False) -> DispatchStats:
    """How ops on DTensors were dispatched in this process since the last reset, by op: hits of the C++ dispatcher, misses,
    and calls that took PyTorch's path, by reason. See docs/dispatch.md for the reasons.

    Args:
        reset: begin to count anew after this call.
    """
    ops = tuple(
        OpDispatch(
            name,
            hits,
            misses,
            miss_seconds,
            MappingProxyType({reason: calls for reason, (calls, _) in stock.items()}),
            sum(seconds for _, seconds in stock.values()),
        )
        for name, (hits, misses, miss_seconds, stock) in dispatch_counts().items()
    )
    if reset:
        reset_dispatch_counts()
    return DispatchStats(is_native(), ops)
