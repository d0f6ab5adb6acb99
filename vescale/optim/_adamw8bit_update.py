"""The update of ``AdamW8bit`` on local tensors, in PyTorch ops; the C++ helper does the same, with the same bits.

One op at a time and each rounded on its own, so that neither the length of a local tensor nor the device shows in a bit.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vescale import csrc
from vescale.errors import OptimizerError
from vescale.optim._blocks import Part

# The dynamic maps of 8-bit optimizers: 256 values, and what finds the nearest one.
#
# Format of Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861): seven decades from
# 1e-6 to 1, each with twice as many evenly spaced values as the one below it, zero and one.


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


@functools.cache
def _map_on(signed: bool, device: torch.device) -> DynamicMap:
    """With its tensors on ``device``, to which a copy would make the host wait in each step."""
    known = dynamic_map(signed)
    return replace(known, values=known.values.to(device), thresholds=known.thresholds.to(device))


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


_CHUNK = 1 << 20  # elements of flat blocks that are worked on at once: bounds temporary memory

_Number = float | torch.Tensor


@dataclass(frozen=True)
class Scalars:
    """The numbers of a step: 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay, lr / (1 - beta1^t), 1 / sqrt(1 - beta2^t),
    eps. Tensors without dims where they must stay on the device."""

    weight1: float
    beta2: float
    weight2: float
    decay: _Number
    step_size: _Number
    inverse_root: _Number
    eps: float
    maximize: bool = False


def host_scalars(group: Mapping[str, Any], step: int) -> Scalars:
    """The numbers of step ``step``, which counts from 1."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return Scalars(
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        decay=1 - lr * group["weight_decay"],
        step_size=lr / (1 - beta1**step),
        inverse_root=1 / math.sqrt(1 - beta2**step),
        eps=group["eps"],
        maximize=group["maximize"],
    )


def device_scalars(group: Mapping[str, Any], step: torch.Tensor, dtype: torch.dtype) -> Scalars:
    """As :func:`host_scalars`, on the device, in float64 until the last rounding."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    t = step.double()
    lr = lr.to(t.device, torch.float64) if isinstance(lr, torch.Tensor) else torch.full_like(t, lr)
    return Scalars(
        weight1=1 - beta1,
        beta2=beta2,
        weight2=1 - beta2,
        decay=(1 - lr * group["weight_decay"]).to(dtype),
        step_size=(lr / (1 - torch.pow(beta1, t))).to(dtype),
        inverse_root=(1 / (1 - torch.pow(beta2, t)).sqrt()).to(dtype),
        eps=group["eps"],
        maximize=group["maximize"],
    )


@dataclass(frozen=True)
class Update:
    """One parameter's local tensors in a step; all contiguous, of one number of elements.

    Attributes:
        param, grad: as they are; ``param`` is written.
        first, second: states, written: codes, or values in bfloat16 or the dtype of :func:`compute_dtype`.
        first_max, second_max: of each block; None for states that are values.
        master: the parameter in float32, for one in lower precision that has one.
        noise: uint16 for each element, for stochastic rounding to bfloat16.
        parts: the blocks of the local tensor.
        scalars: of the step.
    """

    param: torch.Tensor
    grad: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    first_max: torch.Tensor | None
    second_max: torch.Tensor | None
    master: torch.Tensor | None
    noise: torch.Tensor | None
    parts: Sequence[Part]
    scalars: Scalars


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a parameter of ``dtype`` is updated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def update(one: Update) -> None:
    """One step of one parameter, in place."""
    begin = blocks = 0
    for part in _chunks(one.parts):
        end, last = begin + part.numel, blocks + part.num_blocks
        _update_part(one, part, slice(begin, end), slice(blocks, last))
        begin, blocks = end, last


def quantize(x: torch.Tensor, part: Part, codes_of: DynamicMap) -> tuple[torch.Tensor, torch.Tensor]:
    """(code of each element, largest magnitude of each block) of the flat elements of ``part``.

    A block with an element that is not finite has that as its maximum (nan before inf), so that all of it decodes to nan; a
    block of zeros has maximum 0.
    """
    blocked = _blocked(x.float(), part)
    largest = blocked.abs().amax(1)
    is_finite = torch.isfinite(largest)
    divisor = torch.where(is_finite & (largest > 0), largest, 1.0)
    codes = torch.bucketize(blocked / divisor[:, None], codes_of.thresholds.to(x.device), right=True)
    codes = torch.where(is_finite[:, None], codes, codes_of.zero_code).to(torch.uint8)
    return _unblocked(codes, part), torch.where(torch.isnan(largest), torch.nan, largest)


def dequantize(codes: torch.Tensor, largest: torch.Tensor, part: Part, codes_of: DynamicMap) -> torch.Tensor:
    """The float32 values of flat ``codes`` of ``part``."""
    size = part.block_rows * part.block_columns
    each = _unblocked(largest[:, None].expand(-1, size), part) if part.num_blocks > 1 else largest
    return codes_of.values.to(codes.device)[codes.int()] * each


def _chunks(parts: Sequence[Part]) -> list[Part]:
    found = []
    for part in parts:
        if part.matrices == part.rows == 1:
            step = max(1, _CHUNK // part.block_columns) * part.block_columns
            for begin in range(0, part.columns, step):
                found.append(Part(1, 1, min(step, part.columns - begin), 1, part.block_columns))
        else:
            found.append(part)
    return found


def _update_part(one: Update, part: Part, elements: slice, blocks: slice) -> None:
    dtype, s = compute_dtype(one.param.dtype), one.scalars
    param = one.param.view(-1)[elements]
    p = param.to(dtype)
    master = None
    if one.master is not None:
        master = one.master.view(-1)[elements]
        p = torch.where(master.to(param.dtype) == param, master, p)
    g = one.grad.view(-1)[elements].to(dtype)
    if s.maximize:
        g = -g
    signed, unsigned = (_map_on(is_signed, param.device) for is_signed in (True, False))
    first, second = one.first.view(-1)[elements], one.second.view(-1)[elements]
    if one.first_max is not None and one.second_max is not None:
        first_max, second_max = one.first_max.view(-1)[blocks], one.second_max.view(-1)[blocks]
        m = dequantize(first, first_max, part, signed).to(dtype)
        v = dequantize(second, second_max, part, unsigned).to(dtype)
    else:
        m, v = first.to(dtype), second.to(dtype)
    m = m + (g - m) * s.weight1
    v = v * s.beta2 + (g * s.weight2) * g
    denominator = _sqrt(v) * s.inverse_root + s.eps
    p = p * s.decay - (m / denominator) * s.step_size
    if one.first_max is not None and one.second_max is not None:
        codes, largest = quantize(m, part, signed)
        first.copy_(codes)
        first_max.copy_(largest)
        codes, largest = quantize(v, part, unsigned)
        second.copy_(codes)
        second_max.copy_(largest)
    else:
        first.copy_(m)
        second.copy_(v)
    if master is not None:
        master.copy_(p)
    param.copy_(p if one.noise is None else _noisy_bfloat16(p, one.noise[elements]))


def _sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded root, which torch's is not on every CPU (it may come from a library of fast functions)."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def _noisy_bfloat16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The upper half of ``x`` after ``noise`` was added to the lower one: up with the probability of the distance."""
    bits = (x.view(torch.int32) + noise.to(torch.int32)) & -65536
    return torch.where(torch.isfinite(x), bits.view(torch.float32), x)


def _blocked(x: torch.Tensor, part: Part) -> torch.Tensor:
    """A block a row, in the order of the grid, filled up with zeros."""
    tiles = -(-part.columns // part.block_columns)
    rows, columns = part.bands * part.block_rows, tiles * part.block_columns
    x = x.view(part.matrices, part.rows, part.columns)
    if (rows, columns) != (part.rows, part.columns):
        x = torch.nn.functional.pad(x, (0, columns - part.columns, 0, rows - part.rows))
    x = x.view(part.matrices, part.bands, part.block_rows, tiles, part.block_columns)
    return x.transpose(2, 3).reshape(part.num_blocks, part.block_rows * part.block_columns)


def _unblocked(blocked: torch.Tensor, part: Part) -> torch.Tensor:
    tiles = -(-part.columns // part.block_columns)
    x = blocked.reshape(part.matrices, part.bands, tiles, part.block_rows, part.block_columns).transpose(2, 3)
    x = x.reshape(part.matrices, part.bands * part.block_rows, tiles * part.block_columns)
    return x[:, : part.rows, : part.columns].reshape(-1)


# The same update in C++ (``vescale/csrc/adamw8bit.cpp``): all parameters on a CPU in one call, on several threads.


# Codes of the dynamic maps as lines, for vectors of 16 elements: ``Cells`` of ``vescale/csrc/adamw8bit_numbers.h``.
# Within a decade the least numbers of the codes are on a straight line, and lines of later decades rise less. So within
# a cell that has at most one border of two decades in it, the code of a magnitude is the integral part of the lesser of
# two lines. Only the last code, that of 1, begins earlier than its line says.

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


_POINTERS = ("param", "grad", "first", "second", "first_max", "second_max", "master", "noise")
_SIZES = ("matrices", "rows", "columns", "block_rows", "block_columns", "numel", "num_maxima")
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
        ("cells", np.uint64),
        ("bytes", np.uint64),
        ("zero_code", np.int64),
    ]
)
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_CODES = 2
_WIDTH = 16  # at most so many elements in a vector; shows in no result


def is_native(one: Update) -> bool:
    """Whether the helper is there, and takes these tensors: float32 and bfloat16 on the CPU, numbers as scalars."""
    return (
        _library() is not None
        and one.param.device.type == one.grad.device.type == "cpu"
        and one.param.dtype in _DTYPES
        and one.grad.dtype in _DTYPES
        and one.first.dtype in (torch.float32, torch.bfloat16, torch.uint8)
        and not isinstance(one.scalars.step_size, torch.Tensor)
    )


def _library() -> ctypes.CDLL | None:
    """None also for one that was built of sources in which an item is another one."""
    found = csrc.load("adamw8bit")
    return found if found is not None and _item_bytes(found) == _ITEM.itemsize else None


@functools.cache
def _item_bytes(library: ctypes.CDLL) -> int:
    library.adamw8bit_step.restype = library.adamw8bit_item_bytes.restype = ctypes.c_int64
    return int(library.adamw8bit_item_bytes())


def update_all(updates: Sequence[Update]) -> None:
    """One step of all of them, in place, on as many threads as torch uses.

    Raises OptimizerError for states of another size than their parameter's; nothing is written then.
    """
    library = _library()
    assert library is not None
    rows = [row for one in updates for row in _rows(one)]
    if not rows:
        return
    items = np.array(rows, dtype=_ITEM)
    done = library.adamw8bit_step(
        ctypes.c_void_p(items.ctypes.data),
        ctypes.c_int64(len(items)),
        ctypes.c_void_p(_maps().ctypes.data),
        ctypes.c_int32(torch.get_num_threads()),
        ctypes.c_int32(_WIDTH),
    )
    if done != len(items):
        row = dict(zip(_ITEM.names or (), items[done].tolist()))
        raise OptimizerError(
            f"AdamW8bit got states of {row['numel']} elements and {row['num_maxima']} maxima for a part of "
            f"{row['matrices']} x {row['rows']} x {row['columns']} elements in blocks of {row['block_rows']} x "
            f"{row['block_columns']}: its tensors have been replaced. Load states with load_state_dict"
        )


def _rows(one: Update) -> list[tuple[Any, ...]]:
    s, found = one.scalars, []
    per_element = (one.param, one.grad, one.first, one.second)
    numel = min(t.numel() for t in (*per_element, one.master, one.noise) if t is not None)
    num_maxima = min((t.numel() for t in (one.first_max, one.second_max) if t is not None), default=0)
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
        left = max(0, numel - begin), max(0, num_maxima - blocks)
        sizes = (part.matrices, part.rows, part.columns, part.block_rows, part.block_columns, *left)
        found.append((*pointers, *sizes, *kinds, *factors))
        begin, blocks = begin + part.numel, blocks + part.num_blocks
    return found


_LINES = np.dtype(
    [("borders", np.int32, 8)]
    + [(name, np.float32, 8) for name in ("slopes", "offsets", "caps")]
    + [(name, np.int32) for name in ("below", "factor")]
)
_UNITS = 2048  # of a code; far fewer than float32 tells apart, far more than its rounding needs
_NEAR = 4  # units in the last place on both sides of a border


@functools.cache
def _maps() -> npt.NDArray[np.void]:
    return np.array([_map_row(signed) for signed in (True, False)], dtype=_MAP)


_KEPT: list[npt.NDArray[Any]] = []


def _map_row(signed: bool) -> tuple[int, ...]:
    found = dynamic_map(signed)
    padded = np.append(found.thresholds.numpy(), np.float32(np.inf))  # behind the last threshold there is none
    lines = _lines(found.thresholds.numpy()[found.zero_code :], signed)
    cells = code_cells(found.thresholds.numpy()[found.zero_code :])
    planes = _aligned(found.values.numpy().astype("<f4").view(np.uint8).reshape(256, 4).T)
    _KEPT.extend((padded, lines, cells, planes))  # C++ gets their addresses
    pointers = found.values.data_ptr(), *(a.ctypes.data for a in (padded, found.first_codes, lines, cells, planes))
    return *pointers, found.zero_code


def _aligned(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A copy that begins at a multiple of 64 bytes, so that no load of a vector crosses a line of the cache."""
    memory = np.empty(values.size + 64, dtype=np.uint8)
    begin = -memory.ctypes.data % 64
    found = memory[begin : begin + values.size].reshape(values.shape)
    found[...] = values
    return found


def _lines(borders: npt.NDArray[np.float32], signed: bool) -> npt.NDArray[np.void]:
    """The codes of magnitudes as straight lines, one a decade and one for 1; ``borders``: the least number of each code
    above zero's."""
    lines, exact = np.zeros((), dtype=_LINES), borders.astype(np.float64)
    last, ends = 0, []
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        first, last = last + 1, last + count
        slope, offset = count / 0.9 * 10.0 ** (6 - decade), first - count / 9.0
        if decade == 0:  # down to zero
            slope = 0.5 / exact[0] if signed else 1 / (exact[1] - exact[0])
            offset = 1 - exact[0] * slope
        inner = np.arange(first, last)
        assert np.abs(exact[inner] * slope + offset - (inner + 1)).max(initial=0) < 0.1 / _UNITS
        lines["slopes"][decade] = slope * _UNITS
        lines["offsets"][decade] = offset * _UNITS + 0.5
        lines["caps"][decade] = (last + 1) * _UNITS - 1
        ends.append(borders[last])
    lines["offsets"][7] = lines["caps"][7] = (last + 1.5) * _UNITS
    lines["borders"] = np.array([*ends, np.inf], dtype=np.float32).view(np.int32) - _NEAR
    # The upper half of a float32 counts 1/128 of its logarithm: decades from 10**-6.35 on.
    lines["below"] = round((127 - 6.35 / math.log10(2)) * 128)
    lines["factor"] = math.floor(65536 * math.log10(2) / 128)
    upper = (np.array([*ends, 1.0], dtype=np.float32).view(np.int32) >> 16) - lines["below"]
    decades = np.maximum(upper, 0) * lines["factor"] >> 16
    assert (decades == [0, 1, 2, 3, 4, 5, 6, 6]).all()  # that of a border, or the one before it
    return lines
