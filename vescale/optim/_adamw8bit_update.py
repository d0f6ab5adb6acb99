"""The update of ``AdamW8bit`` on local tensors, in PyTorch ops; the C++ helper does the same, with the same bits.

One op at a time and each rounded on its own, so that neither the length of a local tensor nor the device shows in a bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vescale.optim._blocks import Part
from vescale.optim._dynamic_map import DynamicMap, dynamic_map

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
    first, second = one.first.view(-1)[elements], one.second.view(-1)[elements]
    if one.first_max is not None and one.second_max is not None:
        first_max, second_max = one.first_max.view(-1)[blocks], one.second_max.view(-1)[blocks]
        m = dequantize(first, first_max, part, dynamic_map(True)).to(dtype)
        v = dequantize(second, second_max, part, dynamic_map(False)).to(dtype)
    else:
        m, v = first.to(dtype), second.to(dtype)
    m = m + (g - m) * s.weight1
    v = v * s.beta2 + (g * s.weight2) * g
    denominator = _sqrt(v) * s.inverse_root + s.eps
    p = p * s.decay - (m / denominator) * s.step_size
    if one.first_max is not None and one.second_max is not None:
        codes, largest = quantize(m, part, dynamic_map(True))
        first.copy_(codes)
        first_max.copy_(largest)
        codes, largest = quantize(v, part, dynamic_map(False))
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
