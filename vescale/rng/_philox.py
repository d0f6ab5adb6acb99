"""How CUDA ops consume a generator: which thread, counter and lane of Philox makes which element.

A CUDA generator is a seed and an offset. Thread ``t`` of a launch reads the stream of subsequence ``t`` from block
``offset / 4`` on; a block is four 32-bit words. Element numbers are those of the stream (memory order of the tensor).
From ATen's ``DistributionTemplates.h`` and ``Dropout.cu``; :mod:`vescale.rng._cuda_engine` checks each rule on the device.
:func:`philox` is the generator itself, one block at a time in numpy: the reference of the tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Address",
    "GridStride",
    "Launch",
    "PhiloxRule",
    "PhiloxState",
    "Quads",
    "Vectors",
    "fits_one_launch",
    "leaves",
    "philox",
]

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
    """What of a device decides how many threads a launch has."""

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
        """The rule for ``n`` elements, when the op chooses by their number."""
        return self

    @abstractmethod
    def increment(self, launch: Launch, n: int) -> int:
        """How far the op moves the offset."""

    @abstractmethod
    def address(self, launch: Launch, n: int, element: Index) -> Address:
        """Where each element's random number comes from."""


class ChunkedRule(PhiloxRule):
    """A rule whose op, on a whole number of chunks with the offset moved on, makes the elements of those chunks.

    True when the launch has all threads (``n`` saturates the device); a smaller fill is generated whole.
    """

    @abstractmethod
    def chunk(self, launch: Launch) -> int:
        """Elements of a chunk: one pass of all threads."""

    @abstractmethod
    def chunk_increment(self) -> int:
        """How far the offset moves from a chunk to the next."""

    def padded(self, count: int) -> int:
        """Elements of a call that makes at least ``count`` elements by this rule and no other."""
        return count


@dataclass(frozen=True)
class GridStride(ChunkedRule):
    """Element ``i`` is thread ``i % T``'s number ``i // T``; each block of a thread's stream holds ``unroll`` numbers."""

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
    """``native_dropout``: each thread takes ``width`` (1, 2, 4 or 8) neighbours at a time, from one or two blocks.

    The widest that divides the number of elements. The offset moves as if it took 4: a width of 2 or 8 reads beyond,
    and the next op reads those blocks again. A width of 1 is another kernel, which draws as :class:`GridStride`.
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
    """``bernoulli_`` with a tensor of probabilities: four neighbours are the lanes of one block of one thread."""

    def increment(self, launch: Launch, n: int) -> int:
        return 12 if n else 0  # it asks for 10 words, which are rounded up

    def address(self, launch: Launch, n: int, element: Index) -> Address:
        return element // 4, np.zeros_like(element), element % 4


def fits_one_launch(extent: int, itemsize: int) -> bool:
    """Whether 32-bit offsets reach all of ``extent`` elements of memory."""
    return (extent - 1) * itemsize + 1 <= 2**31 - 1 and extent <= 2**31 - 1


def leaves(n: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of the launches that a fill of ``n`` contiguous elements is split into: 32-bit offsets each."""

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
