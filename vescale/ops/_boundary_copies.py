"""What is done before a tensor is read, where there is no C++ for it (``csrc/links.h``).

The tensors before and behind a boundary that moves data are one tensor on one device. A write to one leaves the others with
old values, and the next op of the model's forward that reads one of these calls ``outdated`` of its boundary, which raises.
A gathered copy that is viewed is gathered anew (``_view_copies.py``). What is known of a tensor is an attribute of its local
tensor's storage: it is there for every view, and goes when the last of them does.

Nothing communicates because a tensor exists, but because it is read: when memory is freed may differ between ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import counts_local_writes, local_of

__all__ = [
    "IN_PYTHON",
    "LIVE_COPIES",
    "ORIGIN",
    "OUTDATED_VIEWS",
    "note_writes",
    "pass_boundary",
    "read",
    "read_arguments",
    "settle",
]

# By number, what exists: writes are only followed while there is anything, copies that are viewed or sides of boundaries.
LIVE_COPIES: set[int] = set()
_SIDES: set[int] = set()

# The attribute of the storage of a copy that is viewed, see ``_view_copies.py``.
ORIGIN = "_vescale_copy_of"
_SIDE = "_vescale_side_of_boundary"

# By ``id`` of what ``ORIGIN`` names: brings a copy up to date whose source has been written to.
OUTDATED_VIEWS: dict[int, Callable[[], None]] = {}

IN_PYTHON = not counts_local_writes()

# Methods that read no element.
_METADATA = frozenset(
    (
        *("__get__", "__set__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
        *("storage_offset", "is_contiguous", "element_size", "is_floating_point", "is_complex", "is_inference"),
        *("is_same_size", "requires_grad_", "register_hook", "retain_grad", "type", "get_device"),
    )
)


@dataclass(eq=False)
class _Group:
    """Tensors that were equal when they were made; ``edition`` counts the writes to any of them."""

    edition: int = 0


@dataclass(eq=False)
class _Side:
    """``edition``: which values the tensor holds; -1: values that one device does not have."""

    group: _Group
    outdated: Callable[[], None]
    edition: int = field(default=0)


def pass_boundary(source: DTensor, copy: DTensor, outdated: Callable[[], None] | None) -> DTensor:
    """``copy``, which was made of ``source``; with ``outdated``, at a boundary."""
    if outdated is None or not IN_PYTHON:
        return copy
    before, behind = local_of(source).untyped_storage(), local_of(copy).untyped_storage()
    if before.data_ptr() == behind.data_ptr() and before.nbytes():
        return copy
    side = getattr(before, _SIDE, None)
    if side is None:
        side = _add(before, _Side(_Group(), outdated))
    _add(behind, _Side(side.group, outdated, side.edition))
    return copy


def _add(storage: torch.UntypedStorage, side: _Side) -> _Side:
    setattr(storage, _SIDE, side)
    number = id(side)
    for live in (LIVE_COPIES, _SIDES):
        live.add(number)
        weakref.finalize(side, live.discard, number)
    return side


def note_writes(storages: Sequence[torch.UntypedStorage]) -> None:
    """These have been written to, by one op; they have its values."""
    sides = [side for side in (getattr(storage, _SIDE, None) for storage in storages) if side is not None]
    for group in dict.fromkeys(side.group for side in sides):
        held = [side for side in sides if side.group is group]
        is_newest = all(side.edition == group.edition for side in held)
        group.edition += 1
        for side in held:
            side.edition = group.edition if is_newest else -1


def settle(written: torch.Tensor, other: torch.Tensor) -> None:
    """Both have the newest values now."""
    for storage in (written.untyped_storage(), other.untyped_storage()):
        side: _Side | None = getattr(storage, _SIDE, None)
        if side is not None:
            side.edition = side.group.edition


def read(x: DTensor) -> None:
    """Before ``x`` is read: gather anew what it views, and call ``outdated`` if it has old values, or views a copy of what
    has."""
    if not _SIDES and not OUTDATED_VIEWS:
        return
    storages = list(_storages(local_of(x)))
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
    if not (_SIDES or OUTDATED_VIEWS) or getattr(function, "__name__", "") in _METADATA:
        return
    for value in (*args, *kwargs.values()):
        for item in value if type(value) in (list, tuple) else (value,):
            if isinstance(item, DTensor):
                read(item)
