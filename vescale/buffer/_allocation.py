"""``Allocation``: one block of memory for all the buffers that are needed at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from vescale.compat import set_access_error
from vescale.compat.devices import use_memory_pool
from vescale.errors import BufferMemoryError

_OBSERVERS: list[Callable[[torch.UntypedStorage, int], None]] = []


@contextlib.contextmanager
def observe_allocations(observer: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """Inside, ``observer`` is called with each storage that an :class:`Allocation` has allocated or freed, and its bytes."""
    _OBSERVERS.append(observer)
    try:
        yield
    finally:
        _OBSERVERS.remove(observer)


_ALIGNMENT_BYTES = 256  # a buffer starts where the allocators of devices would start it


class Allocation:
    """Memory that several buffers share: one request allocates it for all of them, and one frees it.

    Buffers first :meth:`reserve` their places; :meth:`allocate` and :meth:`free` then act on all of them. The storage
    stays the same object, so that tensors over it stay valid, and see the memory of the next allocation. Freed memory
    returns to the allocator at once, on the stream that allocated it. What another stream uses is borrowed by it, and not
    freed before it has been given back.

    Args:
        device, pin_memory, pool: what the memory is.
        access_error: what reads and writes of freed memory raise, in C++; None: they end the process.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        pin_memory: bool = False,
        pool: Any = None,
        access_error: str | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        self.pool = pool
        self._access_error = None if access_error is None else access_error.encode()
        self.num_bytes = 0
        self._storage: torch.UntypedStorage | None = None
        self._is_free = True
        self._attached: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._owner_waits: Callable[[Any], None] | None = None

    def reserve(self, num_bytes: int) -> int:
        """The byte offset of a new place. Raises RuntimeError once memory has been allocated."""
        if self._storage is not None:
            raise BufferMemoryError(
                "a place was requested in an allocation that is already in use; reserve all places before the first use"
            )
        offset = -(-self.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.num_bytes = offset + num_bytes
        return offset

    @property
    def is_allocated(self) -> bool:
        return self._storage is not None and (self.num_bytes == 0 or not self._is_free)

    @property
    def storage(self) -> torch.UntypedStorage:
        """Raises RuntimeError before the first :meth:`allocate`."""
        if self._storage is None:
            raise BufferMemoryError("the memory of this buffer has never been allocated; call allocate() first")
        return self._storage

    def contains(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is over this memory."""
        if self._storage is None or tensor.layout is not torch.strided or tensor.device.type != self.device.type:
            return False
        storage = tensor.untyped_storage()
        if self._is_free or not storage.nbytes():
            return False
        return self.is_among((storage.data_ptr(),))

    def is_among(self, addresses: Collection[int]) -> bool:
        """Whether this memory is at one of these addresses."""
        if self._storage is None or self._is_free:
            return False
        return self._storage.data_ptr() in addresses or any(address in addresses for address in self._attached)

    def attach(self, storage: torch.UntypedStorage) -> None:
        """From now on, also allocate and free this memory, which another owner has allocated with its current size."""
        if storage.nbytes():
            self._attached.setdefault(storage.data_ptr(), (storage, storage.nbytes()))

    def allocate(self) -> None:
        """Get the memory, uninitialized, from the current stream's pool; no effect if it is allocated."""
        with use_memory_pool(self.device, self.pool):
            self._allocate()

    def _allocate(self) -> None:
        if self._storage is None:
            block = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device, pin_memory=self.pin_memory)
            self._storage = block.untyped_storage()
        else:
            self._resize(self._storage, self.num_bytes)
        self._is_free = False
        try:
            for storage, num_bytes in self._attached.values():
                self._resize(storage, num_bytes)
        except BaseException:
            self.free()
            raise
        self._tell()

    def lend(self, owner_waits: Callable[[Any], None]) -> None:
        """Another stream uses the memory from now on. ``owner_waits(event)`` makes the stream that has allocated it wait."""
        self._owner_waits = owner_waits

    def give_back(self, *events: Any) -> None:
        """The owner waits for ``events``, after which no other stream uses the memory; no effect if it is not borrowed."""
        owner_waits, self._owner_waits = self._owner_waits, None
        if owner_waits is not None:
            for event in events:
                if event is not None:
                    owner_waits(event)

    def free(self) -> None:
        """Free the memory; tensors over it must not be used until :meth:`allocate`. Raises RuntimeError while borrowed."""
        if self._owner_waits is not None:
            raise BufferMemoryError(
                "memory would be freed while another stream may still use it; expected an earlier give_back() with "
                "the event that ends that stream's use. This is a bug in vescale"
            )
        if self._storage is not None:
            self._resize(self._storage, 0)
        for storage, _ in self._attached.values():
            self._resize(storage, 0)
        self._is_free = True
        self._tell()

    def _resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Addresses without memory, which an estimate takes for more than the host has, stay."""
        if storage.nbytes() != num_bytes and self.device.type != "meta" and storage.resizable():
            if self._access_error is not None:
                set_access_error(storage, None)
            storage.resize_(num_bytes)
            if self._access_error is not None and not num_bytes:
                set_access_error(storage, self._access_error)

    def _tell(self) -> None:
        for observer in tuple(_OBSERVERS):  # another thread may add one
            for storage in (self._storage, *(storage for storage, _ in self._attached.values())):
                if storage is not None:
                    observer(storage, 0 if self._is_free else storage.nbytes())
