"""The dynamic maps of 8-bit optimizers: 256 values, and what finds the nearest one.

Format of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861): seven decades from 1e-6 to 1,
each with twice as many evenly spaced values as the one below it, zero and one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_DECADES = 7


@dataclass(frozen=True)
class DynamicMap:
    """A sorted map of 256 values in [-1, 1] and its inverse.

    Attributes:
        values: 256 of float32, ascending.
        thresholds: 255 of float32; ``x`` has the code ``c`` for ``thresholds[c - 1] <= x < thresholds[c]``: the nearest
            value, the larger one of two that are equally near, as float32 arithmetic sees it.
        first_codes: 65,536 of uint8, by the upper 16 bits of a float32: the code of the smallest such number. The code of
            any other one is the same or the next.
        zero_code: the code of 0.
    """

    values: torch.Tensor
    thresholds: torch.Tensor
    first_codes: npt.NDArray[np.uint8]
    zero_code: int


@functools.cache
def dynamic_map(signed: bool) -> DynamicMap:
    """The map of first moments (signed) or of second ones."""
    values = _values(signed)
    thresholds = _thresholds(values.numpy())
    return DynamicMap(values, torch.from_numpy(thresholds), _first_codes(thresholds), values.tolist().index(0.0))


def _values(signed: bool) -> torch.Tensor:
    found = [0.0, 1.0]
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        borders = torch.linspace(0.1, 1, count + 1, device="cpu", dtype=torch.float32)
        middles = (10 ** (decade - _DECADES + 1) * (borders[:-1] + borders[1:]) / 2.0).tolist()
        found += middles
        if signed:
            found += [-x for x in middles]
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


def _thresholds(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The least float32 ``x`` with ``x - below >= (above - below) / 2``, both sides rounded, for each two neighbours."""
    below, above = values[:-1], values[1:]
    half = (above - below) * np.float32(0.5)
    found = below + half
    for _ in range(8):  # the rounded sum is at most a few numbers off
        smaller = np.nextafter(found, np.float32(-np.inf))
        found = np.where(smaller - below >= half, smaller, found)
    for _ in range(8):
        found = np.where(found - below >= half, found, np.nextafter(found, np.float32(np.inf)))
    assert (found - below >= half).all() and (np.nextafter(found, np.float32(-np.inf)) - below < half).all()
    return np.ascontiguousarray(found)


def _first_codes(thresholds: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    upper = np.arange(65536, dtype=np.uint32) << 16
    ends = np.stack([upper, upper | 0xFFFF]).view(np.float32)
    low, high = np.minimum(ends[0], ends[1]), np.maximum(ends[0], ends[1])
    is_number = np.isfinite(low) & np.isfinite(high)
    first = np.searchsorted(thresholds, np.where(is_number, low, 0), side="right")
    last = np.searchsorted(thresholds, np.where(is_number, high, 0), side="right")
    assert (last - first <= 1).all()
    return np.ascontiguousarray(first.astype(np.uint8))
