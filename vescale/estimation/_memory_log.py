"""``MemoryLog``: which memory is allocated and freed, in the order of a run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Instant(NamedTuple):
    """When memory comes or goes.

    Attributes:
        step: number of the training step.
        phase: ``start``, ``forward``, ``loss``, ``recompute``, ``backward`` or ``optimizer``; of a pipeline also
            ``communication``, between passes, and ``weights``, the second half of a backward that is split.
        module: the path of the module whose op runs; None: of none.
        stage, microbatch: of a pipeline, whose forward or backward runs.
    """

    step: int
    phase: str
    module: str | None
    stage: int | None = None
    microbatch: int | None = None

    @property
    def run(self) -> tuple[int, int | None, int | None]:
        """The same for a forward and its backward."""
        return self.step, self.stage, self.microbatch


@dataclass
class Block:
    """One block of memory, from its allocation until it is freed.

    Attributes:
        num_bytes: its size.
        storage: number of the storage, the same for each allocation of one storage.
        begin, end: numbers of instants; ``end`` is None while it is there.
        is_communicated: a collective has read or written it.
    """

    num_bytes: int
    storage: int
    begin: int
    end: int | None = None
    is_communicated: bool = False


@dataclass
class MemoryLog:
    """All blocks of a run. ``place`` tells where the run is.

    Attributes:
        blocks: in the order of their allocation.
        instants: one for each allocation and each time that memory is freed.
        on_host: numbers of storages that a device would have in the host's memory.
    """

    place: Callable[[], Instant]
    blocks: list[Block] = field(default_factory=list)
    instants: list[Instant] = field(default_factory=list)
    on_host: set[int] = field(default_factory=set)
    is_closed: bool = False
    """Whether the run is over: what is freed then has been there to its end."""
    _alive: dict[int, Block] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=dict)
    _references: dict[int, weakref.ref[torch.UntypedStorage]] = field(default_factory=dict)
    _ranges: dict[int, tuple[int, int]] = field(
        default_factory=dict
    )  # addresses of memory that other storages may share
    _count: int = 0

    def mark(self) -> int:
        """A new instant."""
        self.instants.append(self.place())
        return len(self.instants) - 1

    def see(self, storage: torch.UntypedStorage) -> int:
        """Take a storage into account, if it is new; its number. A storage inside of another's memory has that one's."""
        key = storage._cdata
        number = self._numbers.get(key)
        if number is None:
            number = self._owner(storage)
            is_part = number is not None
            if number is None:
                number, self._count = self._count, self._count + 1
            self._numbers[key] = number
            self._references[key] = weakref.ref(storage, lambda _, n=number: self._gone(key, n, is_part))  # type: ignore[misc]
            if (
                not is_part and storage.nbytes() and storage.device.type != "meta"
            ):  # shapes are propagated without memory
                self._allocate(number, storage.nbytes())
        return number

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """A storage that several others may share has been allocated, or freed."""
        number = self.see(storage)
        block = self._alive.get(number)
        if block is None or block.num_bytes != num_bytes:
            self._free(number)
            if num_bytes:
                self._allocate(number, num_bytes)
        if num_bytes:
            self._ranges[number] = (storage.data_ptr(), storage.data_ptr() + num_bytes)

    def communicated(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            block = self._alive.get(self.see(storage))
            if block is not None:
                block.is_communicated = True

    def _owner(self, storage: torch.UntypedStorage) -> int | None:
        if not self._ranges or not storage.nbytes() or storage.device.type == "meta":
            return None
        try:
            begin = storage.data_ptr()
        except RuntimeError:  # of a fake tensor
            return None
        return next((number for number, (first, last) in self._ranges.items() if first <= begin < last), None)

    def _allocate(self, number: int, num_bytes: int) -> None:
        block = self._alive[number] = Block(num_bytes, number, self.mark())
        self.blocks.append(block)

    def _free(self, number: int) -> None:
        self._ranges.pop(number, None)
        block = self._alive.pop(number, None)
        if block is not None and not self.is_closed:
            block.end = self.mark()

    def _gone(self, key: int, number: int, is_part: bool) -> None:
        self._numbers.pop(key, None)
        self._references.pop(key, None)
        if not is_part:
            self._free(number)
