"""What is done before a tensor is read, where there is no C++ for it (``csrc/links.h``).

The tensors before and behind a boundary that moves data are one tensor on one device. A write to one leaves the others with
old values, and the next op of the model's forward that reads one of these calls ``outdated`` of its boundary, which raises.
A gathered copy that is viewed is gathered anew (``_view_copies.py``). What is known of a tensor is an attribute of its local
tensor's storage: it is there for every view, and goes when the last of them does.

DTensor's ops do not count in the versions of local tensors. So a version that changes after ``to_local()`` tells of a write
by way of that.

Nothing communicates because a tensor exists, but because it is read: when memory is freed may differ between ranks.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from vescale.compat import counts_local_writes, local_of, native_require_current, no_torch_function, version_holder

# By number, what exists: writes are only followed while there is anything, copies that are viewed, sides of boundaries, or
# operands of plain ops.
LIVE_COPIES: set[int] = set()
_SIDES: set[int] = set()

# The attribute of the storage of a copy that is viewed, see ``_view_copies.py``.
ORIGIN = "_vescale_copy_of"
_SIDE = "_vescale_side_of_boundary"
_OPERANDS = "_vescale_operands_of_plain_ops"

# By ``id`` of what ``ORIGIN`` names: brings a copy up to date whose source has been written to.
OUTDATED_VIEWS: dict[int, Callable[[], None]] = {}

# What follows a write to a storage that no op on DTensors has made.
AFTER_LOCAL_WRITES: list[Callable[[torch.UntypedStorage], None]] = []

IN_PYTHON = not counts_local_writes()
_native_require_current = native_require_current()

# Methods that read no element.
_METADATA = frozenset(
    (
        *("__get__", "__set__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
        *("storage_offset", "is_contiguous", "element_size", "is_floating_point", "is_complex", "is_inference"),
        *("is_same_size", "requires_grad_", "register_hook", "retain_grad", "type", "get_device"),
    )
)


@dataclass(eq=False)
class _LocalPart:
    """A local tensor that ``to_local()`` has returned.

    Attributes:
        counter: has its version, without its memory; seen: the version when ranks knew of all writes.
        rank: whose it is: a simulation has several in one process.
    """

    storage: weakref.ref[torch.UntypedStorage]
    counter: torch.Tensor
    seen: int
    rank: int

    def take_write(self) -> torch.UntypedStorage | None:
        """The storage, if there were writes since this was asked."""
        before, self.seen = self.seen, self.counter._version
        return self.storage() if self.seen != before else None


# Of the model's forwards, by ``id`` of a local tensor and of its storage.
_LOCAL_PARTS: dict[tuple[int, int], _LocalPart] = {}


@contextlib.contextmanager
def following_writes() -> Iterator[None]:
    """Inside, writes to DTensors are followed also while nothing is a copy."""
    mark = object()
    LIVE_COPIES.add(id(mark))
    try:
        yield
    finally:
        LIVE_COPIES.discard(id(mark))


def note_local(x: DTensor) -> None:
    """``to_local()`` has returned a view of the local tensor: plain ops may write to it."""
    local = local_of(x)
    storage = local.untyped_storage()
    key = id(local), id(storage)
    if not IN_PYTHON or local.is_inference() or key in _LOCAL_PARTS:
        return
    with no_torch_function():
        _LOCAL_PARTS[key] = _LocalPart(weakref.ref(storage), version_holder(local), local._version, _rank())
    weakref.finalize(storage, _LOCAL_PARTS.pop, key, None)


def note_operand(local: torch.Tensor) -> torch.Tensor:
    """Register ``local``, which shares memory with a DTensor and is an input or a result of ops on plain tensors. These ops
    may save it for backward, which must raise if the DTensor is written to in between. Returns ``local``."""
    if not IN_PYTHON or not torch.is_grad_enabled() or local.is_inference():
        return local
    storage, number = local.untyped_storage(), id(local)
    held: dict[int, weakref.ref[torch.Tensor]] | None = getattr(storage, _OPERANDS, None)
    if held is None:
        held = {}
        setattr(storage, _OPERANDS, held)
    held[number] = weakref.ref(local)
    LIVE_COPIES.add(number)
    weakref.finalize(local, _forget_operand, held, number)
    return local


def _forget_operand(held: dict[int, weakref.ref[torch.Tensor]], number: int) -> None:
    held.pop(number, None)
    LIVE_COPIES.discard(number)


def _count_for_operands(storages: Sequence[torch.UntypedStorage]) -> None:
    """Increment the versions of registered local tensors in these storages, so that autograd detects the write."""
    for storage in storages:
        held: dict[int, weakref.ref[torch.Tensor]] = getattr(storage, _OPERANDS, None) or {}
        for reference in list(held.values()):
            local = reference()
            if local is not None:
                increment_version(local)
        if held:
            count_as_seen(storage)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def count_as_seen(storage: torch.UntypedStorage) -> None:
    """What has been written to the storage was no plain op of the model."""
    for part in list(_LOCAL_PARTS.values()):
        if part.storage() is storage:
            part.seen = part.counter._version


def _written_locals() -> list[torch.UntypedStorage]:
    """Storages of this rank that were written to by way of ``to_local()`` since this was asked."""
    own = _rank()
    found = (part.take_write() for part in list(_LOCAL_PARTS.values()) if part.rank == own)
    return [storage for storage in found if storage is not None]


@dataclass(eq=False)
class _Group:
    """Tensors that were equal when they were made; ``edition`` counts the writes to any of them."""

    edition: int = 0
    sides: weakref.WeakSet[_Side] = field(default_factory=weakref.WeakSet)

    def count_write(self, written: Sequence[_Side]) -> None:
        """For autograd: a write to one of the tensors is a write to all."""
        for side in list(self.sides):
            for reference in () if side in written else side.tensors:
                tensor = reference()
                if tensor is not None and not tensor.is_inference():
                    increment_version(tensor)


@dataclass(eq=False)
class _Side:
    """``edition``: which values the tensor holds; -1: values that one device does not have. ``tensors``: those that autograd
    knows; ``num_writes``: to them."""

    group: _Group
    outdated: Callable[[], None]
    edition: int = field(default=0)
    tensors: list[weakref.ref[DTensor]] = field(default_factory=list)
    num_writes: int = 0


def pass_boundary(source: DTensor, copy: DTensor, outdated: Callable[[], None] | None) -> DTensor:
    """``copy``, which was made of ``source``; with ``outdated``, at a boundary. Where there is C++, it links the two."""
    if outdated is None or not IN_PYTHON:
        return copy
    *_, before = _storages(local_of(source))  # what it views
    behind = local_of(copy).untyped_storage()
    if before is behind:
        return copy
    side = getattr(before, _SIDE, None)
    if side is None:
        side = _add(before, _Side(_Group(), outdated))
    side.tensors.append(weakref.ref(source))
    _add(behind, _Side(side.group, outdated, side.edition, [weakref.ref(copy)]))
    return copy


def _add(storage: torch.UntypedStorage, side: _Side) -> _Side:
    setattr(storage, _SIDE, side)
    side.group.sides.add(side)
    number = id(side)
    for live in (LIVE_COPIES, _SIDES):
        live.add(number)
        weakref.finalize(side, live.discard, number)
    return side


def begin_anew(x: torch.Tensor) -> None:
    """A recomputation takes the values of ``x``, which have not been written to, from the forward: what was behind its
    boundary there, and was written to, has no part in this."""
    storage = local_of(x).untyped_storage() if isinstance(x, DTensor) else None
    if getattr(storage, _SIDE, None) is not None:
        delattr(storage, _SIDE)


def note_writes(storages: Sequence[torch.UntypedStorage]) -> None:
    """These have been written to, by one op on DTensors; they have its values."""
    _count_for_operands(storages)
    sides = [side for side in (getattr(storage, _SIDE, None) for storage in storages) if side is not None]
    for group in dict.fromkeys(side.group for side in sides):
        held = [side for side in sides if side.group is group]
        is_newest = all(side.edition == group.edition for side in held)
        group.edition += 1
        if _counts_writes():
            group.count_write(held)
        for side in held:
            side.num_writes += 1
            side.edition = group.edition if is_newest else -1


def num_writes(x: DTensor) -> int:
    """To the tensor at a boundary, apart from those to the other side of it, which count in its version, too."""
    side: _Side | None = getattr(local_of(x).untyped_storage(), _SIDE, None)
    return -1 if side is None else side.num_writes


@contextlib.contextmanager
def settling() -> Iterator[None]:
    """In this thread, tensors get values that other tensors of their groups have: nobody else's version counts that."""
    before = _counts_writes()
    _THREAD.counts = False
    try:
        yield
    finally:
        _THREAD.counts = before


_THREAD = threading.local()


def _counts_writes() -> bool:
    return getattr(_THREAD, "counts", True)


def settle(written: torch.Tensor, other: torch.Tensor) -> None:
    """Both have the newest values now."""
    for storage in (written.untyped_storage(), *_storages(other)):
        side: _Side | None = getattr(storage, _SIDE, None)
        if side is not None:
            side.edition = side.group.edition


def require_current(tensor: DTensor) -> None:
    """Before anything but an op reads it: gather anew what it views, and call ``outdated`` of a boundary if it has old
    values, or views a copy of what has."""
    if _native_require_current is not None:
        _native_require_current(tensor)
        return
    for storage in _written_locals() if _LOCAL_PARTS and LIVE_COPIES else ():
        AFTER_LOCAL_WRITES[0](storage)
    if not _SIDES and not OUTDATED_VIEWS:
        return
    storages = list(_storages(local_of(tensor)))
    for storage in reversed(storages) if OUTDATED_VIEWS else ():
        update = OUTDATED_VIEWS.pop(id(getattr(storage, ORIGIN, None)), None)
        if update is not None:
            update()
    for storage in storages:
        side: _Side | None = getattr(storage, _SIDE, None)
        if side is not None and side.edition != side.group.edition:
            side.outdated()


def _storages(local: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    storage = local.untyped_storage()
    yield storage
    while (origin := getattr(storage, ORIGIN, None)) is not None:
        storage = origin.local.untyped_storage()
        yield storage


def read_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a torch function reads its arguments."""
    if (
        not (_SIDES or OUTDATED_VIEWS or (_LOCAL_PARTS and LIVE_COPIES))
        or getattr(function, "__name__", "") in _METADATA
    ):
        return
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, DTensor):
                require_current(item)
