"""How native CPU ops consume the generator: the words of the stream from which each element is computed.

A *word* is a 32-bit output of the generator. A :class:`DrawRule` generates any range of a fill of ``n`` elements: it calls
the native op on a small contiguous tensor, with a generator advanced to the right word, so that the bits are the native
ones on every processor. Measured with torch 2.13, and checked on first use by :mod:`vescale.rng._cpu_engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from vescale.rng._mt19937 import Mt19937State

# Drawing at most this many words costs less than reading the generator's state, skipping and writing it back.
DISCARDED_WORDS = 1 << 14

# The native op: fills a contiguous 1-D tensor from a generator.
NativeFill = Callable[[torch.Tensor, torch.Generator], object]


class Cursor:
    """A private generator that is moved along the words after a state."""

    def __init__(self, start: Mt19937State) -> None:
        self.start = start
        self._generator = torch.Generator()
        self._word = 0  # the position of the generator
        self._found = (0, start)  # the last state returned, from which a short skip starts
        start.write_to(self._generator)

    def at(self, word: int, drawing: int) -> torch.Generator:
        """The generator ``word`` words after the start; the caller draws ``drawing`` words from it."""
        ahead = word - self._word
        if 0 < ahead <= DISCARDED_WORDS:
            torch.empty(ahead, dtype=torch.uint8).random_(generator=self._generator)  # a word each
        elif ahead:
            self.state(word).write_to(self._generator)
        self._word = word + drawing
        return self._generator

    def state(self, word: int) -> Mt19937State:
        """The state ``word`` words after the start."""
        if word >= self._word > self._found[0]:
            nearest = (self._word, Mt19937State.of(self._generator))
        else:
            nearest = self._found if word >= self._found[0] else (0, self.start)
        self._found = (word, nearest[1].skip(word - nearest[0]))
        return self._found[1]


class DrawRule(ABC):
    """How a fill of ``n`` elements draws. Elements are numbered in memory order."""

    @abstractmethod
    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        """Elements ``start .. start + len(out)`` of a fill of ``n``, into the contiguous 1-D ``out``."""

    @abstractmethod
    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        """The state after a fill of ``n`` elements."""


@dataclass(frozen=True)
class WordsPerElement(DrawRule):
    """Element ``i`` is computed from the words ``words * i .. words * (i + 1)``."""

    words: int

    def num_words(self, n: int) -> int:
        """Words that a fill of ``n`` elements draws."""
        return self.words * n

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        fill(out, cursor.at(self.words * start, self.words * out.numel()))

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        return cursor.state(self.num_words(n))


@dataclass(frozen=True)
class NormalBlocks(DrawRule):
    """``normal_`` on 16 or more contiguous elements: Box-Muller within blocks of 16 elements.

    If ``n`` is not a multiple of 16, the last 16 elements are then computed again from 16 more uniforms, which follow those
    of the incomplete block (float32, float64) or of the last whole block (``half_tail``: bfloat16, float16).
    """

    words: int
    half_tail: bool

    UNIT: ClassVar[int] = 16  # elements that are computed together

    def tail_word(self, n: int) -> int:
        """The first word of the last 16 elements, if these are computed again."""
        return self.words * (n // 16 * 16 if self.half_tail else n)

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        words, stop = self.words, start + out.numel()
        tail = n - 16 if n % 16 else n
        main_stop = min(stop, tail)
        position = start
        while position < main_stop:
            block = position // 16 * 16
            whole = main_stop // 16 * 16
            if position == block and whole > block:  # whole blocks, in place
                fill(out[position - start : whole - start], cursor.at(words * block, words * (whole - block)))
                position = whole
            else:
                scratch = torch.empty(16, dtype=out.dtype)
                fill(scratch, cursor.at(words * block, words * 16))
                end = min(block + 16, main_stop)
                out[position - start : end - start] = scratch[position - block : end - block]
                position = end
        if stop > tail:
            first = max(start, tail)
            scratch = torch.empty(16, dtype=out.dtype)
            fill(scratch, cursor.at(self.tail_word(n), words * 16))
            out[first - start :] = scratch[first - tail : stop - tail]

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        return cursor.state(self.num_words(n))

    def num_words(self, n: int) -> int:
        """Words that a fill of ``n`` elements draws."""
        return self.tail_word(n) + self.words * 16 if n % 16 else self.words * n


@dataclass(frozen=True)
class NormalPairs(DrawRule):
    """``log_normal_``, and ``normal_`` on few or non-contiguous elements: pairs of double normals, of four words each.

    The generator state keeps the second value of a pair for the next op of this kind. ``strided``: the op does this on
    non-contiguous tensors only.
    """

    strided: bool

    def _fill(self, count: int, dtype: torch.dtype, generator: torch.Generator, fill: NativeFill) -> torch.Tensor:
        out = torch.empty(2 * count, dtype=dtype)[::2] if self.strided else torch.empty(count, dtype=dtype)
        fill(out, generator)
        return out

    def _generator(self, state: Mt19937State) -> torch.Generator:
        generator = torch.Generator()
        state.write_to(generator)
        return generator

    def generate(self, cursor: Cursor, n: int, start: int, out: torch.Tensor, fill: NativeFill) -> None:
        waiting = int(cursor.start.normal_waits)
        if start == 0 and waiting:  # the first element is the kept value: no words
            out[:1] = self._fill(1, out.dtype, self._generator(cursor.start), fill)
            out, start = out[1:], 1
        if not out.numel():
            return
        second = (start - waiting) % 2  # 1: the first element is the second of a pair
        state = cursor.state(2 * (start - waiting - second)).without_waiting_normal()
        if second or self.strided:
            out.copy_(self._fill(second + out.numel(), out.dtype, self._generator(state), fill)[second:])
        else:
            fill(out, self._generator(state))

    def final(self, cursor: Cursor, n: int, dtype: torch.dtype, fill: NativeFill) -> Mt19937State:
        state, count = cursor.start, n
        drawn = n - int(cursor.start.normal_waits)
        if drawn > 0:  # only the last pair matters: draw it again
            count = 2 - drawn % 2
            state = cursor.state(2 * (drawn - count)).without_waiting_normal()
        generator = self._generator(state)
        self._fill(count, dtype, generator, fill)
        return Mt19937State.of(generator)
