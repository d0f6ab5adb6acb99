"""Random bits that depend on an element's global index, not on who draws them or on what was drawn before.

They come from no generator's state: a counter-based generator is asked for the number at a place. So ranks may draw their
parts in any order, or not at all, and a resumed program draws what the interrupted one would have drawn.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch

from vescale import csrc
from vescale.rng._philox import PhiloxState, philox

__all__ = ["indexed_bits"]

_NUMBERS = 8  # numbers of 16 bits in a block of Philox
_CHUNK = 1 << 20


def indexed_bits(seed: int, stream: int, draw: int, runs: Iterable[tuple[int, int]]) -> torch.Tensor:
    """16 random bits for each element of ``runs``, (global index of the first, number) in local order; uint16 on the CPU.

    Philox4x32-10 with key ``seed``: element ``i`` has number ``i % 8`` of the block ``i // 8``, in the subsequence that
    ``stream`` (31 bits, for example one for each parameter) and ``draw`` (32 bits, for example the step) name. The same on
    every mesh, with and without the C++ helper. No communication.
    """
    spans = np.array(list(runs), dtype=np.int64).reshape(-1, 2)
    out = torch.empty(int(spans[:, 1].sum()), dtype=torch.uint16)
    subsequence = (stream & 0x7FFFFFFF) << 32 | draw & 0xFFFFFFFF
    seed &= 0xFFFFFFFFFFFFFFFF
    library = csrc.load("philox")
    if library is not None:
        library.philox_indexed_bits(
            ctypes.c_uint64(seed),
            ctypes.c_uint64(subsequence),
            ctypes.c_int64(len(spans)),
            ctypes.c_void_p(spans.ctypes.data),
            ctypes.c_void_p(out.data_ptr()),
        )
        return out
    target, begin = out.numpy(), 0
    for start, length in spans.tolist():
        for first in range(start, start + length, _CHUNK):
            stop = min(first + _CHUNK, start + length)
            blocks = np.arange(first // _NUMBERS, -(-stop // _NUMBERS), dtype=np.int64)
            drawn = philox(PhiloxState(seed, 0), np.array(subsequence), blocks).astype("<u4").view("<u2").reshape(-1)
            skipped = first % _NUMBERS
            target[begin : begin + stop - first] = drawn[skipped : skipped + stop - first]
            begin += stop - first
    return out
