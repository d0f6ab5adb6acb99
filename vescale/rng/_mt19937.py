"""``Mt19937State``: the state of a CPU generator as a value, and the state n words later."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vescale import csrc
from vescale.errors import GeneratorError

# Skips words of the 32-bit Mersenne Twister: by computing the blocks in between, or by a jump over any distance. A
# block is the 624 untempered words that the generator reads. The words obey a linear recurrence over GF(2) whose
# characteristic polynomial ``phi`` has degree 19937 and 135 terms, so that word ``n + i`` is the sum of the words ``j +
# i`` with ``t^j`` in ``t^n mod phi`` (Haramoto, Matsumoto, Nishimura, Panneton, L'Ecuyer: "Efficient jump ahead for
# F2-linear random number generators", 2008). Polynomials over GF(2) are Python ints; bit j is the coefficient of t^j.
# The C++ helper ``vescale/csrc/mt19937.cpp`` computes the same twenty times faster.

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


# The bytes of at::CPUGeneratorImplState: the engine (seed, words left in the block, seeded, next word, the block), then
# the second value of the last pair of double normals, if one is kept, then the same for float (never set).
_STATE = np.dtype(
    {
        "names": ["left", "next", "block", "normal_y", "normal_is_valid"],
        "formats": ["<i4", "<u8", ("<u8", (BLOCK_WORDS,)), "<f8", "<i4"],
        "offsets": [8, 16, 24, 5024, 5040],
        "itemsize": 5056,
    }
)

_WORDS = 24  # offset of the block


@dataclass(frozen=True, eq=False)
class Mt19937State:
    """A generator state. ``position`` words of ``block`` are drawn (624: a new block is due)."""

    raw: bytes
    block: Block
    position: int
    normal_waits: bool

    @classmethod
    def of(cls, generator: torch.Generator) -> Mt19937State:
        return cls.parse(generator.get_state().numpy().tobytes())

    @classmethod
    def parse(cls, raw: bytes) -> Mt19937State:
        if len(raw) != _STATE.itemsize:
            raise GeneratorError(
                f"a CPU generator state of {len(raw)} bytes; expected {_STATE.itemsize} (mt19937). "
                "This build of torch has another CPU generator: report it, with `torch.__config__.show()`"
            )
        fields = np.frombuffer(raw, _STATE)[0]
        block = fields["block"].astype(np.uint32)
        return cls(raw, block, BLOCK_WORDS + 1 - int(fields["left"]), bool(fields["normal_is_valid"]))

    def packed(self) -> bytes:
        """The state in half the bytes: torch stores each 32-bit word in 64 bits."""
        return self.raw[:_WORDS] + self.block.tobytes() + self.raw[_WORDS + 8 * BLOCK_WORDS :]

    @classmethod
    def unpacked(cls, packed: bytes) -> Mt19937State:
        block = np.frombuffer(packed, np.uint32, BLOCK_WORDS, _WORDS)
        return cls.parse(packed[:_WORDS] + block.astype("<u8").tobytes() + packed[_WORDS + 4 * BLOCK_WORDS :])

    def skip(self, num_words: int) -> Mt19937State:
        """The state after drawing ``num_words`` words, byte for byte."""
        if num_words == 0:
            return self
        # A block is refilled by the draw that needs it, not by the one that empties it: position stays in 1 .. 624.
        num_blocks, before_last = divmod(self.position + num_words - 1, BLOCK_WORDS)
        block = advance_blocks(self.block, num_blocks) if num_blocks else self.block
        position = before_last + 1
        fields = np.frombuffer(bytearray(self.raw), _STATE)
        fields["left"] = BLOCK_WORDS + 1 - position
        fields["next"] = position
        if num_blocks:
            fields["block"] = block
        return Mt19937State(fields.tobytes(), block, position, self.normal_waits)

    def without_waiting_normal(self) -> Mt19937State:
        """The same position in the stream, without a kept second value of a pair of normals."""
        if not self.normal_waits:
            return self
        fields = np.frombuffer(bytearray(self.raw), _STATE)
        fields["normal_is_valid"] = 0
        fields["normal_y"] = 0.0
        return replace(self, raw=fields.tobytes(), normal_waits=False)

    def write_to(self, generator: torch.Generator) -> None:
        generator.set_state(torch.frombuffer(bytearray(self.raw), dtype=torch.uint8))

    def words_until(self, later: Mt19937State, limit: int) -> int | None:
        """The number of words drawn from this state to ``later``, if at most ``limit``; by trying, for the self-checks."""
        for count in range(limit + 1):
            state = self.skip(count)
            if state.position == later.position and np.array_equal(state.block, later.block):
                return count
        return None
