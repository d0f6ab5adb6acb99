"""Views whose operand had to be gathered, and writes to such a view and to its base.

``x[0]`` of a tensor that is sharded over dim 0 cannot be a view of the shards: DTensor gathers ``x`` and views the copy. On
one device ``x[0].zero_()`` changes ``x``, and ``x.zero_()`` changes ``x[0]``. So the copy records its origin:

* After each write to the copy, or to any view of it, the local parts are written back; a replicated copy needs no
  communication for that.
* Before an op reads the copy, or a view of it, after a write to ``x`` (by an op on DTensors, or on a local tensor that
  autograd takes for a view), the copy is gathered anew: implicit communication, as making the view was. ``csrc/links.h``
  finds that out from versions. Without the C++ dispatcher, writes by ops on DTensors are followed; what is written to
  outside of a model's forward, where reads are not seen, is gathered anew at once.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from vescale.comm import note_write
from vescale.compat import DTensorSpec, local_of, no_torch_function
from vescale.errors import OpPlacementError
from vescale.ops._boundary_copies import (
    AFTER_LOCAL_WRITES,
    LIVE_COPIES,
    ORIGIN,
    OUTDATED_VIEWS,
    count_as_seen,
    note_writes,
)
from vescale.ops._conversion import link_view, settle_view
from vescale.ops._observer import report_implicit_move
from vescale.placements import move_local

# Storages of copies whose bases C++ does not watch, by the same numbers.
_UNWATCHED: dict[int, weakref.ref[torch.UntypedStorage]] = {}


@dataclass(frozen=True, eq=False)
class _Origin:
    """Where a gathered copy came from.

    Attributes:
        local: this rank's part of the original; kept alive as long as the copy, as a view keeps its base.
        source, target: the original's spec and the copy's.
        size, stride, offset: of the copy in its storage.
    """

    local: torch.Tensor
    source: DTensorSpec
    target: DTensorSpec
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def remember_copy(local: torch.Tensor, source: DTensorSpec, copy: torch.Tensor, target: DTensorSpec) -> None:
    """``copy`` is ``local``, brought from ``source`` to ``target`` to be viewed."""
    storage = copy.untyped_storage()
    if storage is local.untyped_storage():  # not by address: ranks with empty parts remember what others do
        return
    origin = _Origin(local, source, target, tuple(copy.shape), copy.stride(), int(copy.storage_offset()))
    number = id(origin)
    LIVE_COPIES.add(number)
    setattr(storage, ORIGIN, origin)
    if not link_view(local, copy, _update):
        _UNWATCHED[number] = weakref.ref(storage)
    weakref.finalize(origin, _forget, number)


def _forget(number: int) -> None:
    LIVE_COPIES.discard(number)
    _UNWATCHED.pop(number, None)
    OUTDATED_VIEWS.pop(number, None)


def write_through(x: DTensor, *, sees_reads: bool = False) -> None:
    """``x`` was written to: if it views a gathered copy, bring the copy's new values to what it is a copy of.
    ``sees_reads``: inside of a model's forward."""
    storage = local_of(x).untyped_storage()
    written = [storage]
    note_write(x)
    while (origin := getattr(storage, ORIGIN, None)) is not None:
        with torch.no_grad(), no_torch_function():
            copy, source, target = _copy_of(origin, storage), origin.source, origin.target
            origin.local.copy_(move_local(copy, source.mesh, source.shape, target.placements, source.placements).wait())
            settle_view(copy)
            note_write(origin.local)
        storage = origin.local.untyped_storage()
        count_as_seen(storage)
        written.append(storage)
    note_writes(written)
    if _UNWATCHED:
        _follow_writes(written, sees_reads)


def _after_local_write(storage: torch.UntypedStorage) -> None:
    """By way of ``to_local()``, in a model's forward. As ``csrc/links.h`` answers."""
    if getattr(storage, ORIGIN, None) is not None:
        raise OpPlacementError(
            "a view that divides a sharded dim is a view of a gathered copy, and to_local() of it was written to: "
            "unlike on one device, its base does not get the new values; write to the DTensor instead"
        )
    note_writes([storage])
    if _UNWATCHED:
        _follow_writes([storage], sees_reads=True)


AFTER_LOCAL_WRITES.append(_after_local_write)


def _follow_writes(written: list[torch.UntypedStorage], sees_reads: bool) -> None:
    """Copies of the last of the storages that were written to are out of date, and copies of these. The others hold what
    was written."""
    current, outdated = {id(storage) for storage in written[:-1]}, {id(storage) for storage in written}
    for number, reference in list(_UNWATCHED.items()):  # copies of copies come later
        storage = reference()
        if storage is None or id(storage) in current:
            continue
        if id(getattr(storage, ORIGIN).local.untyped_storage()) in outdated:
            outdated.add(id(storage))
            if sees_reads:
                OUTDATED_VIEWS[number] = functools.partial(_gather_if_alive, reference)
            else:
                _gather_again(storage)


def _gather_if_alive(reference: weakref.ref[torch.UntypedStorage]) -> None:
    storage = reference()
    if storage is not None:
        _gather_again(storage)


def _update(on_copy: torch.Tensor) -> None:
    """``on_copy``: an empty tensor with the storage of a copy, of whose base there were writes."""
    _gather_again(on_copy.untyped_storage())


def _gather_again(storage: torch.UntypedStorage) -> None:
    origin: _Origin = getattr(storage, ORIGIN)
    source, target = origin.source, origin.target
    report_implicit_move(
        "a view, after a write to its base,", "self", origin.local, source.placements, target.placements, _EDIT
    )
    with torch.no_grad(), no_torch_function():
        moved = move_local(origin.local, source.mesh, source.shape, source.placements, target.placements).wait()
        _copy_of(origin, storage).copy_(moved)


_EDIT = "take the view after the write, or of a tensor that is Replicate on that axis"


def _copy_of(origin: _Origin, storage: torch.UntypedStorage) -> torch.Tensor:
    return origin.local.new_empty(0).set_(storage, origin.offset, origin.size, origin.stride)
