"""``Mt19937State``: the state of a CPU generator as a value, and the state n words later."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from vescale.errors import GeneratorError
from vescale.rng._mt19937_jump import BLOCK_WORDS, Block, advance_blocks

__all__ = ["Mt19937State"]

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
