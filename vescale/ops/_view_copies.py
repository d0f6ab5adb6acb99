"""Views whose operand had to be gathered, and writes to such a view.

``x[0]`` of a tensor that is sharded over dim 0 cannot be a view of the shards: DTensor gathers ``x`` and views the copy. On
one device ``x[0].zero_()`` changes ``x``. So the copy records its origin, and after each write to it, or to any view of it,
the local parts are written back; a replicated copy needs no communication for that. A write to ``x`` does not reach copies
that were made before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import DTensorSpec, local_of, no_torch_function
from vescale.placements import move_local

__all__ = ["LIVE_COPIES", "remember_copy", "write_through"]

# By number, the copies that exist: writes are only followed while there are any.
LIVE_COPIES: set[int] = set()

# An attribute of the copy's storage: it is there for every view of the copy, and goes when the last of them does.
_ORIGIN = "_vescale_copy_of"


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
    if storage.data_ptr() == local.untyped_storage().data_ptr():
        return
    origin = _Origin(local, source, target, tuple(copy.shape), copy.stride(), int(copy.storage_offset()))
    LIVE_COPIES.add(id(origin))
    weakref.finalize(origin, LIVE_COPIES.discard, id(origin))
    setattr(storage, _ORIGIN, origin)


def write_through(x: DTensor) -> None:
    """``x`` was written to: if it views a gathered copy, bring the copy's new values to what it is a copy of."""
    storage = local_of(x).untyped_storage()
    while (origin := getattr(storage, _ORIGIN, None)) is not None:
        with torch.no_grad(), no_torch_function():
            copy = origin.local.new_empty(0).set_(storage, origin.offset, origin.size, origin.stride)
            source, target = origin.source, origin.target
            origin.local.copy_(move_local(copy, source.mesh, source.shape, target.placements, source.placements).wait())
        storage = origin.local.untyped_storage()
