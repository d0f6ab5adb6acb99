"""How CUDA ops consume a generator: the thread, Philox counter and lane from which each element is computed.

The state of a CUDA generator is a seed and an offset. Thread ``t`` of a launch reads subsequence ``t``, starting with block
``offset / 4``; a block is four 32-bit words, and a *lane* is the position of a word in its block. Elements are numbered in
memory order. The rules follow ATen's ``DistributionTemplates.h`` and ``Dropout.cu``; :mod:`vescale.rng._cuda_engine` checks
each one on the device. :func:`philox` is the generator itself in numpy, the reference of the tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
Address = tuple[Index, Index, Index]  # subsequence, block (after the offset), lane

_BLOCK = 256  # threads


@dataclass(frozen=True)
class PhiloxState:
    """A generator state. ``offset`` counts words and is a multiple of 4."""

    seed: int
    offset: int


@dataclass(frozen=True)
class Launch:
    """The properties of a device that determine the number of threads of a launch."""

    num_sms: int
    threads_per_sm: int

    @property
    def max_threads(self) -> int:
        return _BLOCK * self.num_sms * (self.threads_per_sm // _BLOCK)

    def threads(self, n: int) -> int:
        """Threads of a launch for ``n`` elements."""
        return min(self.max_threads, -(-n // _BLOCK) * _BLOCK)


class PhiloxRule(ABC):
    """How one op draws ``n`` elements."""

    def at(self, n: int) -> PhiloxRule:
        """The rule for ``n`` elements, for ops that choose by the number of elements."""
        return self

    @abstractmethod
    def increment(self, launch: Launch, n: int) -> int:
        """The distance by which the op advances the offset."""

    @abstractmethod
    def address(self, launch: Launch, n: int, element: Index) -> Address:
        """The position in the generator's stream of each element's random number."""


class ChunkedRule(PhiloxRule):
    """A rule whose op writes whole chunks alike wherever they start: with the offset advanced to a chunk, it writes its
    elements.

    This holds if the launch has all threads (``n`` saturates the device); a smaller fill is generated whole.
    """

    @abstractmethod
    def chunk(self, launch: Launch) -> int:
        """The number of elements of a chunk: one pass of all threads."""

    @abstractmethod
    def chunk_increment(self) -> int:
        """The distance of the offsets of two consecutive chunks."""

    def padded(self, count: int) -> int:
        """The number of elements of a call that generates at least ``count`` elements by this very rule."""
        return count


@dataclass(frozen=True)
class GridStride(ChunkedRule):
    """Element ``i`` is number ``i // T`` of thread ``i % T``; each block of a thread's stream holds ``unroll`` numbers."""

    unroll: int

    def increment(self, launch: Launch, n: int) -> int:
        return 4 * ((n - 1) // (launch.threads(n) * self.unroll) + 1) if n else 0

    def address(self, launch: Launch, n: int, element: Index) -> Address:
        number, thread = np.divmod(element, launch.threads(n))
        return thread, number // self.unroll, number % self.unroll

    def chunk(self, launch: Launch) -> int:
        return launch.max_threads * self.unroll

    def chunk_increment(self) -> int:
        return 4


@dataclass(frozen=True)
class Vectors(ChunkedRule):
    """``native_dropout``: each thread processes ``width`` (1, 2, 4 or 8) adjacent elements at a time, from one or two
    blocks.

    The width is the largest one that divides the number of elements. The offset advances as if the width were 4: with a
    width of 2 or 8 more blocks are read, and the next op reads them again. A width of 1 is another kernel, which draws as
    :class:`GridStride`.
    """

    width: int

    def at(self, n: int) -> Vectors:
        width = self.width
        while n % width:
            width //= 2
        return Vectors(width)

    def increment(self, launch: Launch, n: int) -> int:
        return 4 * ((n - 1) // (launch.threads(n) * 4) + 1) if n else 0

    def address(self, launch: Launch, n: int, element: Index) -> Address:
        if self.width == 1:
            return GridStride(4).address(launch, n, element)
        group, place = np.divmod(element, self.width)
        number, thread = np.divmod(group, launch.threads(n))
        return thread, number * max(1, self.width // 4) + place // 4, place % 4

    def chunk(self, launch: Launch) -> int:
        return launch.max_threads * (4 if self.width == 1 else self.width)

    def chunk_increment(self) -> int:
        return 4 * max(1, self.width // 4)

    def padded(self, count: int) -> int:
        # One more group, so that no wider vector divides the number of elements.
        return count + self.width if count % (2 * self.width) == 0 else count


@dataclass(frozen=True)
class Quads(PhiloxRule):
    """``bernoulli_`` with a tensor of probabilities: four adjacent elements use the lanes of one block of one thread."""

    def increment(self, launch: Launch, n: int) -> int:
        return 12 if n else 0  # 10 words, rounded up

    def address(self, launch: Launch, n: int, element: Index) -> Address:
        return element // 4, np.zeros_like(element), element % 4


def fits_one_launch(extent: int, itemsize: int) -> bool:
    """Whether 32-bit offsets reach all of ``extent`` elements of memory."""
    return (extent - 1) * itemsize + 1 <= 2**31 - 1 and extent <= 2**31 - 1


def leaves(n: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the launches into which a fill of ``n`` contiguous elements is split, so that each has 32-bit
    offsets."""

    def split(start: int, stop: int) -> Iterator[tuple[int, int]]:
        if fits_one_launch(stop - start, itemsize):
            yield start, stop
        else:
            middle = start + (stop - start) // 2
            yield from split(start, middle)
            yield from split(middle, stop)

    yield from split(0, n)


_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)


def philox(state: PhiloxState, subsequence: Index, block: Index) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 (Salmon et al. 2011) as curand counts: the four words of each block, shape ``(..., 4)``."""
    place = np.asarray(block).astype(np.uint64) + np.uint64(state.offset // 4)
    thread = np.asarray(subsequence).astype(np.uint64)
    shift = np.uint64(32)
    c = [place & _LOW, place >> shift, thread & _LOW, thread >> shift]
    key = [state.seed & 0xFFFFFFFF, state.seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = (c[2 * i] * np.uint64(_MULTIPLIERS[i]) for i in (0, 1))
        c = [
            (second >> shift) ^ c[1] ^ np.uint64(key[0]),
            second & _LOW,
            (first >> shift) ^ c[3] ^ np.uint64(key[1]),
            first & _LOW,
        ]
        key = [(key[i] + _KEY_STEPS[i]) & 0xFFFFFFFF for i in (0, 1)]
    return np.stack(c, axis=-1).astype(np.uint32)
