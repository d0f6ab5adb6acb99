"""Merged names of repeated layers: ``layers.0.fc`` and ``layers.1.fc`` become ``layers.0-1.fc``."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

__all__ = ["merge_repeats", "name_list"]

T = TypeVar("T", bound=Hashable)

# A dotted name with its numeric parts taken out, and those parts as sorted tuples of numbers.
_Row = tuple[tuple[str | None, ...], tuple[tuple[int, ...], ...]]


def merge_repeats(items: Iterable[tuple[str, T]]) -> list[tuple[str, T, int]]:
    """Merge ``(dotted name, rest)`` pairs whose names differ in numeric parts only and whose rests are equal.

    Returns ``(merged name, rest, how many)`` in the order of first appearance.
    """
    rows: dict[tuple[_Row, T], int] = {}
    for name, rest in items:
        key = (_split(name), rest)
        rows[key] = rows.get(key, 0) + 1
    columns = max((len(numbers) for ((_, numbers), _) in rows), default=0)
    for column in reversed(range(columns)):
        merged: dict[tuple[_Row, T], tuple[set[int], int]] = {}
        for ((parts, numbers), rest), count in rows.items():
            own = numbers[column] if column < len(numbers) else ()
            others = (*numbers[:column], (), *numbers[column + 1 :]) if own else numbers
            found, total = merged.get(((parts, others), rest), (set(), 0))
            merged[(parts, others), rest] = (found | set(own), total + count)
        rows = {}
        for ((parts, numbers), rest), (own_set, count) in merged.items():
            if own_set:
                numbers = (*numbers[:column], tuple(sorted(own_set)), *numbers[column + 1 :])
            rows[(parts, numbers), rest] = count
    return [(_join(row), rest, count) for (row, rest), count in rows.items()]


def name_list(names: Iterable[str], limit: int = 4) -> str:
    """Names for a message: repeated layers merged, at most ``limit`` of them, the model itself as ``the model``."""
    merged = [name or "the model" for name, _, _ in merge_repeats((name, None) for name in dict.fromkeys(names))]
    more = len(merged) - limit
    return ", ".join(merged[:limit]) + (f" and {more} more" if more > 0 else "")


def _split(name: str) -> _Row:
    parts = name.split(".")
    numeric = [part.isdecimal() for part in parts]
    return (
        tuple(None if is_number else part for part, is_number in zip(parts, numeric)),
        tuple((int(part),) for part, is_number in zip(parts, numeric) if is_number),
    )


def _join(row: _Row) -> str:
    parts, numbers = row
    remaining = iter(numbers)
    return ".".join(part if part is not None else _ranges(next(remaining)) for part in parts)


def _ranges(numbers: tuple[int, ...]) -> str:
    """``0-3,7`` of sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
