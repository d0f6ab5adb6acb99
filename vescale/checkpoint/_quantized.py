"""Quantized tensors of checkpoints, dequantized by slices: only the blocks of a rank's part are read.

========== ======================================= ==================================================================
kind       in files                                values
========== ======================================= ==================================================================
fp8        ``X`` (8-bit floats), ``X_scale_inv``    ``X * scale`` of its block, 128 x 128 or what the scales' shape says
MXFP4      ``X_blocks`` (..., G, 16), ``X_scales``  4-bit floats, two a byte, times a power of two for each 32
========== ======================================= ==================================================================

MXFP4 weights of gpt-oss have rows of outputs where transformers' parameters have columns; they are transposed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from vescale.checkpoint._stored import Stored
from vescale.checkpoint._stored_blocks import block_values
from vescale.errors import ContentMismatchError

_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Quantized:
    """A tensor in two files' tensors.

    Attributes:
        shape: of the values.
        weights, scales: names in the checkpoint.
        block: rows and columns that share a scale; None for MXFP4.
        transposed: the last two dims are exchanged in the model.
    """

    shape: tuple[int, ...]
    weights: str
    scales: str
    block: tuple[int, int] | None

    @property
    def transposed(self) -> bool:
        return self.block is None


def find_quantized(stored: Stored, block: Sequence[int] | None = None) -> dict[str, Quantized]:
    """The quantized tensors of a checkpoint, by the name of their values.

    Args:
        block: rows and columns of a block, as the configuration says; None: 128 x 128.

    Raises CheckpointError where weights and scales do not fit together.
    """
    found: dict[str, Quantized] = {}
    for name, tensor in stored.tensors.items():
        if tensor.dtype in _FP8:
            scales = next((scale for scale in _scale_names(name) if scale in stored.tensors), None)
            if scales is not None:
                grid = stored.tensors[scales].shape
                found[name] = Quantized(tensor.shape, name, scales, _block(name, tensor.shape, grid, block))
        elif name.endswith("_blocks") and tensor.dtype == torch.uint8:
            values, scales = name.removesuffix("_blocks"), name.removesuffix("_blocks") + "_scales"
            if scales not in stored.tensors:
                raise ContentMismatchError(f"{stored.folder}: {name} has no {scales} next to it")
            if tensor.shape[:-1] != stored.tensors[scales].shape or len(tensor.shape) < 3:
                raise ContentMismatchError(
                    f"{stored.folder}: {name} of shape {tensor.shape} and {scales} of shape "
                    f"{stored.tensors[scales].shape}; expected scales of shape {tensor.shape[:-1]}"
                )
            *lead, groups, width = tensor.shape
            found[values] = Quantized((*lead, groups * width * 2), name, scales, None)
    return found


def _scale_names(name: str) -> Iterator[str]:
    yield f"{name}_scale_inv"
    yield f"{name}_scale"
    if name.endswith(".weight"):
        yield name.removesuffix(".weight") + ".scale"
        yield name.removesuffix(".weight") + ".qscale_weight"


def _block(name: str, shape: tuple[int, ...], grid: tuple[int, ...], wanted: Sequence[int] | None) -> tuple[int, int]:
    rows, columns = shape[-2:] if len(shape) > 1 else (1, *shape)
    scale_rows, scale_columns = (1, 1) if not grid else ((1, 1, *grid)[-2:])
    if len(grid) > 2 and grid[:-2] != shape[:-2]:
        raise ContentMismatchError(f"{name} of shape {shape} has scales of shape {grid}")

    def size(total: int, count: int, given: int) -> int:
        if -(-total // given) == count:
            return given
        if count and total % count == 0:
            return total // count
        raise ContentMismatchError(f"{name} of shape {shape} has scales of shape {grid}; expected one for each {given}")

    sizes = wanted or (128, 128)
    return size(rows, scale_rows, sizes[0]), size(columns, scale_columns, sizes[1])


def read_block(
    stored: Stored, source: str, quantized: Mapping[str, Quantized], first: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A block of a tensor's values: float32 where it is quantized, else as stored."""
    entry = quantized.get(source)
    if entry is None:
        return block_values(stored, source, first, sizes)
    if entry.block is not None:
        return _fp8(stored, entry, tuple(first), tuple(sizes))
    return _mxfp4(stored, entry, tuple(first), tuple(sizes))


def _fp8(stored: Stored, entry: Quantized, first: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    values = block_values(stored, entry.weights, first, sizes).to(torch.float32)
    assert entry.block is not None
    grid = stored.tensors[entry.scales].shape
    dims = min(2, len(sizes))
    heights = entry.block[2 - dims :]
    low = [at // height for at, height in zip(first[-dims:], heights)]
    high = [-(-(at + n) // height) for at, n, height in zip(first[-dims:], sizes[-dims:], heights)]
    if len(grid) < dims or (len(grid) == 1 and dims == 2):  # one scale for all, or one a row
        scales = block_values(stored, entry.scales, (0,) * len(grid), grid).reshape(
            (1,) * (2 - len(grid)) + tuple(grid)
        )
        scales = _powers(scales)[low[0] : high[0], low[1] : high[1]] if dims == 2 else _powers(scales).reshape(-1)
    else:
        lead = len(grid) - dims
        counts = [b - a for a, b in zip(low, high)]
        begins = (*first[:lead], *low) if lead else tuple(low)
        scales = _powers(block_values(stored, entry.scales, begins, (*sizes[:lead], *counts)))
    for dim, (at, begin, height, n) in enumerate(zip(first[-dims:], low, heights, sizes[-dims:])):
        axis = dim - dims
        if scales.shape[axis] * height >= n:
            wide = scales.repeat_interleave(height, axis)
            scales = wide.narrow(axis, at - begin * height, n)
    return values.mul_(scales)


def _powers(scales: torch.Tensor) -> torch.Tensor:
    """float32; bytes are exponents of two, as in E8M0."""
    if scales.dtype == torch.uint8:
        return torch.exp2(scales.to(torch.float32) - 127)
    return scales.to(torch.float32)


def _mxfp4(stored: Stored, entry: Quantized, first: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    width = stored.tensors[entry.weights].shape[-1]
    low, high = first[-1] // (2 * width), -(-(first[-1] + sizes[-1]) // (2 * width))
    begins, counts = (*first[:-1], low), (*sizes[:-1], high - low)
    packed = block_values(stored, entry.weights, (*begins, 0), (*counts, width))
    exponents = block_values(stored, entry.scales, begins, counts).to(torch.int32) - 127
    table = torch.tensor(_FP4, dtype=torch.float32, device="cpu")
    values = torch.empty(*counts, 2 * width, dtype=torch.float32, device="cpu")
    values[..., 0::2] = table[(packed & 15).int()]
    values[..., 1::2] = table[(packed >> 4).int()]
    values = torch.ldexp(values, exponents.unsqueeze(-1)).flatten(-2)
    return values.narrow(-1, first[-1] - low * 2 * width, sizes[-1])
