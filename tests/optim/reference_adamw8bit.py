"""8-bit AdamW on one page: plain arrays, one block after the other, the nearest of 256 values by searching all of them.

Equations: AdamW (arXiv:1711.05101) on moments that are stored as codes by block (arXiv:2110.02861). Each operation is
rounded to float32 on its own, and the update takes the moments before they are rounded to codes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
_F = np.float32


def reference_map(signed: bool) -> Array:
    """Decade d in 0..6 holds the middles of 2^d (unsigned: 2^(d+1)) equal parts of [0.1, 1], times 10^(d-6)."""
    found = [0.0, 1.0]
    for d in range(7):
        parts = 2**d if signed else 2 ** (d + 1)
        middles = 10.0 ** (d - 6) * (0.1 + 0.9 * (np.arange(parts) + 0.5) / parts)
        found += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(found)).astype(_F)


def encode(x: Array, values: Array) -> tuple[npt.NDArray[np.uint8], np.float32]:
    """Codes of one block, and its largest magnitude."""
    largest = np.abs(x).max()
    scaled = x / largest if largest > 0 else x
    below = np.clip(np.searchsorted(values, scaled, side="right") - 1, 0, 254)
    is_above = scaled - values[below] >= (values[below + 1] - values[below]) * _F(0.5)
    return (below + is_above).astype(np.uint8), largest


class ReferenceAdamW8bit:
    """One parameter; ``blocks``: for each block the indices of its elements in the flattened parameter."""

    def __init__(self, param: Array, blocks: list[npt.NDArray[np.int64]], maps: tuple[Array, Array]) -> None:
        self.param, self.blocks, self.maps, self.t = param.reshape(-1).copy(), blocks, maps, 0
        self.codes = [np.full(param.size, values.tolist().index(0.0), np.uint8) for values in maps]
        self.largest = [np.zeros(len(blocks), _F) for _ in maps]

    def step(
        self, grad: Array, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 1e-2
    ) -> None:
        self.t += 1
        beta1, beta2 = betas
        for number, at in enumerate(self.blocks):
            g = grad.reshape(-1)[at]
            m, v = (values[c[at]] * top[number] for values, c, top in zip(self.maps, self.codes, self.largest))
            m = m + (g - m) * _F(1 - beta1)
            v = v * _F(beta2) + (g * _F(1 - beta2)) * g
            denominator = np.sqrt(v) * _F(1 / np.sqrt(1 - beta2**self.t)) + _F(eps)
            self.param[at] = self.param[at] * _F(1 - lr * decay) - (m / denominator) * _F(lr / (1 - beta1**self.t))
            for k, moment in enumerate((m, v)):
                self.codes[k][at], self.largest[k][number] = encode(moment, self.maps[k])


def flat_blocks(numel: int, size: int) -> list[npt.NDArray[np.int64]]:
    return [np.arange(begin, min(begin + size, numel)) for begin in range(0, numel, size)]


def row_blocks(shape: tuple[int, ...], rows: int, columns: int) -> list[npt.NDArray[np.int64]]:
    *_, m, n = shape
    index = np.arange(np.prod(shape)).reshape(-1, m, n)
    return [
        matrix[r : r + rows, c : c + columns].reshape(-1)
        for matrix in index
        for r in range(0, m, rows)
        for c in range(0, n, columns)
    ]
