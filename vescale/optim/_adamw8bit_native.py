"""The same update in C++ (``vescale/csrc/adamw8bit.cpp``): all parameters on a CPU in one call, on several threads."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vescale import csrc
from vescale.optim._adamw8bit_update import Update
from vescale.optim._dynamic_map import dynamic_map

__all__ = ["is_native", "update_all"]

_POINTERS = ("param", "grad", "first", "second", "first_max", "second_max", "master", "noise")
_SIZES = ("matrices", "rows", "columns", "block_rows", "block_columns")
_KINDS = ("param_dtype", "grad_dtype", "states", "maximize")
_FACTORS = ("weight1", "beta2", "weight2", "decay", "step_size", "inverse_root", "eps", "unused")
_ITEM = np.dtype(
    [(name, np.uint64) for name in _POINTERS]
    + [(name, np.int64) for name in _SIZES]
    + [(name, np.int32) for name in _KINDS]
    + [(name, np.float32) for name in _FACTORS]
)
_MAP = np.dtype(
    [
        ("values", np.uint64),
        ("thresholds", np.uint64),
        ("first_codes", np.uint64),
        ("lines", np.uint64),
        ("zero_code", np.int64),
    ]
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CODES = 2


def is_native(one: Update) -> bool:
    """Whether the helper is there, and takes these tensors: float32 and bfloat16 on the CPU, numbers as scalars."""
    return (
        csrc.load("adamw8bit") is not None
        and one.param.device.type == one.grad.device.type == "cpu"
        and one.param.dtype in _DTYPES
        and one.grad.dtype in _DTYPES
        and one.first.dtype in (torch.float32, torch.bfloat16, torch.uint8)
        and not isinstance(one.scalars.step_size, torch.Tensor)
    )


def update_all(updates: Sequence[Update]) -> None:
    """One step of all of them, in place, on as many threads as torch uses."""
    library = csrc.load("adamw8bit")
    assert library is not None
    rows = [row for one in updates for row in _rows(one)]
    if not rows:
        return
    items = np.array(rows, dtype=_ITEM)
    library.adamw8bit_step(
        ctypes.c_void_p(items.ctypes.data),
        ctypes.c_int64(len(items)),
        ctypes.c_void_p(_maps().ctypes.data),
        ctypes.c_int32(torch.get_num_threads()),
    )


def _rows(one: Update) -> list[tuple[Any, ...]]:
    s, found = one.scalars, []
    per_element = (one.param, one.grad, one.first, one.second)
    kinds = (
        _DTYPES[one.param.dtype],
        _DTYPES[one.grad.dtype],
        _CODES if one.first_max is not None else _DTYPES[one.first.dtype],
        int(s.maximize),
    )
    factors = (s.weight1, s.beta2, s.weight2, s.decay, s.step_size, s.inverse_root, s.eps, 0.0)
    begin = blocks = 0
    for part in one.parts:
        pointers = [t.data_ptr() + begin * t.element_size() for t in per_element]
        pointers += [0 if t is None else t.data_ptr() + blocks * 4 for t in (one.first_max, one.second_max)]
        pointers += [0 if t is None else t.data_ptr() + begin * t.element_size() for t in (one.master, one.noise)]
        sizes = (part.matrices, part.rows, part.columns, part.block_rows, part.block_columns)
        found.append((*pointers, *sizes, *kinds, *factors))
        begin, blocks = begin + part.numel, blocks + part.num_blocks
    return found


_LINES = np.dtype(
    [(name, np.float32, 8) for name in ("borders", "slopes", "offsets", "from", "to")] + [("margin", np.float32)]
)
_MARGIN = 2.0**-11  # far more than the rounding of numbers up to 256, far less than the distance of codes


@functools.cache
def _maps() -> npt.NDArray[np.void]:
    return np.array([_map_row(signed) for signed in (True, False)], dtype=_MAP)


_KEPT: list[npt.NDArray[Any]] = []


def _map_row(signed: bool) -> tuple[int, int, int, int, int]:
    found = dynamic_map(signed)
    padded = np.append(found.thresholds.numpy(), np.float32(np.inf))  # behind the last threshold there is none
    lines = _lines(found.thresholds.numpy()[found.zero_code :].astype(np.float64), signed)
    _KEPT.extend((padded, lines))  # C++ gets their addresses
    pointers = found.values.data_ptr(), padded.ctypes.data, found.first_codes.ctypes.data, lines.ctypes.data
    return *pointers, found.zero_code


def _lines(thresholds: npt.NDArray[np.float64], signed: bool) -> npt.NDArray[np.void]:
    """The codes of positive numbers, decade by decade, as straight lines; ``thresholds``: of these codes, from zero's on."""
    lines = np.zeros((), dtype=_LINES)
    width = 1 if signed else 2
    lines["to"][0] = thresholds[0] * (1 - 1e-6)
    lines["offsets"][0] = 0.5
    for decade in range(1, 8):
        count = width * 2 ** (decade - 1)
        low = count - (width - 1)  # the first code
        slope = count / 0.9 * 10.0 ** (7 - decade)
        lines["slopes"][decade] = slope
        lines["offsets"][decade] = low - count / 9.0 - _MARGIN / 2
        lines["borders"][decade] = thresholds[low - 1]
        # Tables decide next to the borders, and between the end of the even part of a decade and the next border.
        lines["from"][decade] = thresholds[low - 1] * (1 + 1e-6)
        lines["to"][decade] = min(10.0 ** (decade - 7), thresholds[low + count - 1]) * (1 - 1e-6)
    lines["margin"] = _MARGIN
    return lines
