"""Skips words of the 32-bit Mersenne Twister: by computing the blocks in between, or by a jump over any distance.

A block is the 624 untempered words that the generator reads. The words obey a linear recurrence over GF(2) whose
characteristic polynomial ``phi`` has degree 19937 and 135 terms, so that word ``n + i`` is the sum of the words ``j + i``
with ``t^j`` in ``t^n mod phi`` (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer: "Efficient jump ahead for F2-linear
random number generators", 2008). Polynomials over GF(2) are Python ints; bit j is the coefficient of t^j. The C++ helper
``vescale/csrc/mt19937.cpp`` computes the same twenty times faster.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from vescale import csrc

__all__ = ["BLOCK_WORDS", "Block", "advance_blocks", "characteristic_exponents", "power_of_t"]

BLOCK_WORDS = 624
_MIDDLE_WORD = 397
_LOW_BITS = 31
_MATRIX = 0x9908B0DF
_DEGREE = 19937
_RESIDUE_LIMBS = (_DEGREE + 63) // 64

# From this number of blocks on, a jump is used. It is a little below the measured break-even: a jump whose polynomial is
# cached costs a fifth, and shapes repeat in a model.
_JUMP_FROM_NATIVE = 6_000
_JUMP_FROM_NUMPY = 10_000

Block = npt.NDArray[np.uint32]


@functools.cache
def characteristic_exponents() -> tuple[int, ...]:
    """The exponents of phi below the leading 19937, descending, from the closed form of the authors' appendix A."""
    terms = [(1, _LOW_BITS)] + [
        (1, _LOW_BITS - 1 - bit) if bit < _LOW_BITS else (31 - bit, 0) for bit in range(32) if _MATRIX >> bit & 1
    ]
    counts = Counter(
        one + other
        for full, short in terms
        for one in _power(BLOCK_WORDS, _MIDDLE_WORD, full)
        for other in _power(BLOCK_WORDS - 1, _MIDDLE_WORD - 1, short)
    )
    exponents = tuple(sorted((e for e, count in counts.items() if count % 2), reverse=True))
    if len(exponents) != 135 or exponents[0] != _DEGREE or exponents[1] != 19314:
        raise AssertionError("the characteristic polynomial of mt19937 came out wrong")
    return exponents[1:]


def _power(high: int, low: int, exponent: int) -> Iterator[int]:
    """The exponents of ``(t^high + t^low)^exponent``. A binomial coefficient is odd if the bits of the lower number are
    among those of the upper one (Lucas)."""
    return (high * i + low * (exponent - i) for i in range(exponent + 1) if i & ~exponent == 0)


@functools.cache
def _spread_bytes() -> npt.NDArray[np.uint16]:
    """A table: for each byte, its bits moved to the even positions (the square of the polynomial)."""
    return np.array([sum((byte >> bit & 1) << 2 * bit for bit in range(8)) for byte in range(256)], dtype="<u2")


def _reduced(polynomial: int) -> int:
    exponents = characteristic_exponents()
    while (excess := polynomial.bit_length() - _DEGREE) > 0:
        # The second exponent is 623 below the first, so that the upper 623 bits go at once and do not come back.
        cut = max(_DEGREE, polynomial.bit_length() - 623) if excess > 623 else _DEGREE
        high = polynomial >> cut
        polynomial ^= high << cut
        base = cut - _DEGREE
        folded = 0
        for exponent in exponents:
            folded ^= high << exponent
        polynomial ^= folded << base
    return polynomial


@functools.lru_cache(maxsize=256)
def power_of_t(distance: int) -> int:
    """``t^distance mod phi``."""
    residue = 1
    for bit in bin(distance)[2:]:
        raw = residue.to_bytes((residue.bit_length() + 7) // 8, "little")
        residue = int.from_bytes(_spread_bytes()[np.frombuffer(raw, np.uint8)].tobytes(), "little")
        if bit == "1":
            residue <<= 1
        residue = _reduced(residue)
    return residue


def _following_block(block: Block) -> Block:
    """The next block, in three vector steps, each of words that do not depend on each other."""
    split = BLOCK_WORDS - _MIDDLE_WORD
    following = np.empty_like(block)

    def mix(start: int, stop: int, lower: Block, middle: Block) -> None:
        y = (block[start:stop] & np.uint32(0x80000000)) | (lower & np.uint32(0x7FFFFFFF))
        following[start:stop] = middle ^ (y >> np.uint32(1)) ^ ((y & np.uint32(1)) * np.uint32(_MATRIX))

    mix(0, split, block[1 : split + 1], block[_MIDDLE_WORD:])
    mix(split, 2 * split, block[split + 1 : 2 * split + 1], following[:split])
    mix(2 * split, BLOCK_WORDS - 1, block[2 * split + 1 :], following[split : _MIDDLE_WORD - 1])
    last = BLOCK_WORDS - 1
    mix(last, last + 1, following[:1], following[_MIDDLE_WORD - 1 : _MIDDLE_WORD])
    return following


def _apply(residue: int, block: Block) -> Block:
    """The block at the distance of ``residue``. All bits of ``block`` must obey the recurrence."""
    blocks = [block]
    for _ in range(_DEGREE // BLOCK_WORDS + 1):
        blocks.append(_following_block(blocks[-1]))
    words = np.concatenate(blocks)
    windows = np.lib.stride_tricks.sliding_window_view(words, BLOCK_WORDS)
    raw = np.frombuffer(residue.to_bytes((_DEGREE + 7) // 8, "little"), np.uint8)
    chosen = np.flatnonzero(np.unpackbits(raw, bitorder="little"))
    total = np.zeros(BLOCK_WORDS, np.uint32)
    for start in range(0, len(chosen), 512):  # 1.3 MB of windows at a time
        total ^= np.bitwise_xor.reduce(windows[chosen[start : start + 512]], axis=0)
    return total


def _skip_by_numpy(block: Block, num_blocks: int) -> Block:
    """Compute every block in between, with numpy's own loop over the same generator (no output, no memory)."""
    bits = np.random.MT19937()
    state: Any = bits.state
    state["state"] = {"key": block.copy(), "pos": BLOCK_WORDS}
    bits.state = state
    bits.random_raw(num_blocks * BLOCK_WORDS, output=False)
    return np.array(bits.state["state"]["key"], dtype=np.uint32)


@functools.cache
def _helper(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer = ctypes.c_void_p
    library.mt19937_twist.argtypes = [pointer, ctypes.c_uint64]
    library.mt19937_polynomial.argtypes = [ctypes.c_uint64, pointer, ctypes.c_int32, pointer]
    library.mt19937_apply.argtypes = [pointer, pointer]
    for function in (library.mt19937_twist, library.mt19937_polynomial, library.mt19937_apply):
        function.restype = None
    return library


@functools.lru_cache(maxsize=256)
def _native_power_of_t(library: ctypes.CDLL, distance: int) -> npt.NDArray[np.uint64]:
    exponents = np.array(characteristic_exponents(), np.int32)
    residue = np.empty(_RESIDUE_LIMBS, np.uint64)
    library.mt19937_polynomial(distance, exponents.ctypes.data, len(exponents), residue.ctypes.data)
    return residue


def advance_blocks(block: Block, num_blocks: int) -> Block:
    """The block ``num_blocks >= 0`` blocks after ``block``, which is not changed.

    Costs 0.1 us a block, at most 2 ms, with the C++ helper (without it 1 us a block, at most 30 ms).
    """
    library = csrc.load("mt19937")
    if library is None:
        if num_blocks < _JUMP_FROM_NUMPY:
            return _skip_by_numpy(block, num_blocks) if num_blocks else block.copy()
        # 31 bits of the first word of a seeded block are outside of the recurrence: advance by one real step.
        return _apply(power_of_t((num_blocks - 1) * BLOCK_WORDS), _following_block(block))
    library = _helper(library)
    block = block.copy()
    if num_blocks < _JUMP_FROM_NATIVE:
        library.mt19937_twist(block.ctypes.data, num_blocks)
    else:
        library.mt19937_twist(block.ctypes.data, 1)
        residue = _native_power_of_t(library, (num_blocks - 1) * BLOCK_WORDS)
        library.mt19937_apply(residue.ctypes.data, block.ctypes.data)
    return block
