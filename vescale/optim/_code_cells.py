"""Codes of the dynamic maps as lines, for vectors of 16 elements: ``Cells`` of ``vescale/csrc/adamw8bit_numbers.h``.

Within a decade the least numbers of the codes are on a straight line, and lines of later decades rise less. So within a cell
that has at most one border of two decades in it, the code of a magnitude is the integral part of the lesser of two lines.
Only the last code, that of 1, begins earlier than its line says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["code_cells"]

_CELLS = np.dtype(
    [
        ("slopes", np.float32, (2, 16)),
        ("offsets", np.float32, (2, 16)),
        ("last_slope", np.float32),
        ("last_offset", np.float32),
    ]
)
_BELOW, _FACTOR = 13224, 303  # with these each cell of both maps is the lesser of two lines
_UNSURE = 1 / 4096  # a code is done again by the definition where the fraction is less
_ROUNDING = 1e-4  # more than products and sums in float32 make of a difference

_Line = tuple[float, float]


def code_cells(borders: npt.NDArray[np.float32]) -> npt.NDArray[np.void]:
    """``borders``: the least number of each code above zero's."""
    exact, last = borders[:-1].astype(np.float64), len(borders)
    upper = np.arange(0x3F81, dtype=np.uint32)  # of the float32 from 0 to 1 and a little more
    of_upper = (np.maximum(upper.astype(np.int64) - _BELOW, 0) * _FACTOR) >> 16
    assert of_upper[-1] < 16
    cells = np.zeros((), dtype=_CELLS)
    for cell in range(16):
        own = upper[of_upper == cell]
        if not len(own):
            continue
        low, high = np.array([own[0] << 16, (own[-1] + 1) << 16], dtype=np.uint32).view(np.float32).astype(np.float64)
        high = min(high, 1.000001)
        begin, end = np.searchsorted(exact, low, side="right"), np.searchsorted(exact, high, side="left")
        lines = _lesser_lines([(exact[n], n + 1.0) for n in range(begin, end)], begin, low, high)
        for place, (slope, offset) in enumerate(lines):
            cells["slopes"][place, cell] = slope
            cells["offsets"][place, cell] = offset + _UNSURE / 2
    # Through the border of 1, and half a code higher at 1.
    cells["last_slope"] = 0.5 / (1 - float(borders[-1]))
    cells["last_offset"] = last + 0.5 - 0.5 / (1 - float(borders[-1])) + _UNSURE / 2
    return cells


def _lesser_lines(points: Sequence[tuple[float, float]], code: int, low: float, high: float) -> tuple[_Line, _Line]:
    """Two lines of which the lesser has the integral part that the points say for all numbers from ``low`` to ``high``;
    ``code``: below the first point."""
    if not points:
        return (0.0, code + 0.5), (0.0, code + 0.5)
    for cut in range(len(points)):
        first, second = points[:cut], points[cut:]
        lines = _line(first or second, second, low, high), _line(second, first, low, high)

        def lesser(x: float, lines: tuple[_Line, _Line] = lines) -> float:
            return min(slope * x + offset for slope, offset in lines)

        is_near = max(abs(lesser(x) - y) for x, y in points) < _ROUNDING
        if is_near and lesser(low) >= code and lesser(high) < code + len(points) + 1:
            return lines
    raise AssertionError(f"no two lines for the codes from {low} to {high}")


def _line(
    points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], low: float, high: float
) -> _Line:
    """Through the points; through one alone and the nearest of the others, or with a small slope."""
    (x, y), (end, top) = points[0], points[-1]
    if len(points) == 1:
        near = min(others, key=lambda point: abs(point[0] - x)) if others and others[0] != points[0] else None
        if near is None:
            slope = 0.45 / max(x - low, high - x)
            return slope, y - slope * x
        end, top = near
    slope = (top - y) / (end - x)
    return slope, y - slope * x
