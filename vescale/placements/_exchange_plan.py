"""What each rank sends to each other rank when a tensor changes its placements: pure index arithmetic, cached.

A rank receives every element of its new region from the one rank that holds it under the old placements and has the same
coordinate on the axes where the old placements replicate. An element that the rank holds already is therefore not sent,
and no element is sent to a rank twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor.placement_types import Placement

from vescale.placements._placement_kinds import contiguous_stride, is_sharded, ragged_axis, shard_dim
from vescale.placements._region import Box, Region, local_region


@dataclass(frozen=True)
class Piece:
    """What passes from one rank to another: the same blocks, located in the sender's and in the receiver's local tensor."""

    source: tuple[Box, ...]
    target: tuple[Box, ...]

    @property
    def numel(self) -> int:
        return sum(box.numel for box in self.source)


@dataclass(frozen=True)
class Exchange:
    """One rank's part of a change of placement, pieces in group rank order.

    Attributes:
        sends, receives: the piece for, and from, each rank of the group (this rank's own included).
        source, target: this rank's regions before and after.
        peer_sources: the regions of the group's ranks before.
        index: this rank's position in the group.
        moves: whether any element changes owner; the same on every rank of the group.
        gathers: every rank of the group receives the whole old local tensor of every other.
    """

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    source: Region
    target: Region
    peer_sources: tuple[Region, ...]
    index: int
    moves: bool
    gathers: bool

    @property
    def kept(self) -> Piece:
        """What passes from this rank to itself."""
        return self.receives[self.index]

    @functools.cached_property
    def send_span(self) -> tuple[int, int] | None:
        """``(begin, end)`` when the pieces to send are adjacent and in order in the old local tensor: no copy needed."""
        return _joint_span([box for piece in self.sends for box in piece.source], self.source.local_shape)

    @functools.cached_property
    def receives_in_place(self) -> bool:
        """Whether the received pieces, one after the other, are the new local tensor: no copy needed.

        Also for a gather, where a piece arrives in its sender's local order: pieces list their blocks in that order, and
        a block that is contiguous among the target's whole rows is so among the sender's, which has no other rows.
        """
        return _fills(self.receives, self.target)

    @functools.cached_property
    def keeps_in_place(self) -> bool:
        """Whether what passes from this rank to itself is the new local tensor, in its order."""
        return _fills((self.kept,), self.target)


def exchange_axes(source: Sequence[Placement], target: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh axes along which elements may change owner.

    An axis drops out where the old placement holds everything (each rank serves itself), where the new one is Partial
    (each rank keeps what it has), and where the same shard-like placements come first on its dim in both (both regions
    are then within the same chunk).
    """
    settled: set[int] = set()
    for dim in {d for p in (*source, *target) if (d := shard_dim(p)) is not None}:
        before = [axis for axis, p in enumerate(source) if shard_dim(p) == dim]
        after = [axis for axis, p in enumerate(target) if shard_dim(p) == dim]
        for a, b in zip(before, after):
            if a != b or source[a] != target[b]:
                break
            settled.add(a)
    axes = [axis for axis, p in enumerate(source) if is_sharded(p) and axis not in settled]
    ragged = ragged_axis(source)
    if axes == [ragged] and tuple(source) == tuple(target):
        axes = []
    return tuple(axis for axis in axes if not target[axis].is_partial())


def plan_exchange(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    source: Sequence[Placement],
    target: Sequence[Placement],
    coordinate: Sequence[int],
    peers: Sequence[tuple[int, ...]],
) -> Exchange:
    """The exchange of the rank at ``coordinate`` with ``peers``, the coordinates of its group in group rank order."""
    return _plan(tuple(shape), tuple(mesh_shape), tuple(source), tuple(target), tuple(coordinate), tuple(peers))


@functools.lru_cache(maxsize=8192)
def _plan(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    source: tuple[Placement, ...],
    target: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    peers: tuple[tuple[int, ...], ...],
) -> Exchange:
    old = [local_region(shape, source, mesh_shape, peer) for peer in peers]
    new = [local_region(shape, target, mesh_shape, peer) for peer in peers]
    own_old = local_region(shape, source, mesh_shape, coordinate)
    own_new = local_region(shape, target, mesh_shape, coordinate)
    sends = tuple(_piece(own_old, region) for region in new)
    receives = tuple(_piece(region, own_new) for region in old)
    gathers = (
        len(peers) > 1
        and all(region == own_new for region in new)
        and sum(region.numel for region in old) == own_new.numel
        and all(piece.numel == region.numel for piece, region in zip(receives, old))
    )
    # An old placement may leave a rank less than the new one asks for (Partial: the rest is filled), never more.
    moves = any(_piece(before, after).numel != after.numel for before, after in zip(old, new))
    return Exchange(sends, receives, own_old, own_new, tuple(old), peers.index(coordinate), moves, gathers)


_NOTHING = Piece((), ())


def _piece(source: Region, target: Region) -> Piece:
    if source.rows[1] <= target.rows[0] or target.rows[1] <= source.rows[0]:
        return _NOTHING  # most pairs of ranks of a large mesh
    common = [pair for a in source.boxes for b in target.boxes if (pair := a.intersect(b)) is not None]
    return Piece(tuple(pair[0] for pair in common), tuple(pair[1] for pair in common))


def _span(box: Box, local_shape: tuple[int, ...]) -> tuple[int, int] | None:
    """``(begin, end)`` of a block in the row-major local tensor, or None when it is not contiguous there."""
    if box.local_strides is None:
        strides = contiguous_stride(local_shape)
        begin = sum(start * stride for start, stride in zip(box.local_start, strides))
    else:
        strides, begin = box.local_strides, box.local_start[0]
    expected = 1
    for size, stride in zip(reversed(box.sizes), reversed(strides)):
        if size > 1 and stride != expected:
            return None
        expected *= size
    return begin, begin + box.numel


def _joint_span(boxes: Sequence[Box], local_shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The span of blocks that follow each other without a gap, or None; ``(0, 0)`` for no block at all."""
    if not boxes:
        return 0, 0
    begin = end = -1
    for box in boxes:
        span = _span(box, local_shape)
        if span is None or (end >= 0 and span[0] != end):
            return None
        begin = span[0] if begin < 0 else begin
        end = span[1]
    return begin, end


def _fills(pieces: Sequence[Piece], target: Region) -> bool:
    """Whether the pieces, one after the other, are the whole local tensor."""
    return _joint_span([box for piece in pieces for box in piece.target], target.local_shape) == (0, target.numel)


def pack(local: torch.Tensor, pieces: Sequence[Piece], span: tuple[int, int] | None) -> torch.Tensor:
    """The pieces of a local tensor one after the other, flat; a view where they are adjacent already."""
    if span is not None and local.is_contiguous():
        return local.reshape(-1)[span[0] : span[1]]
    packed = local.new_empty(sum(piece.numel for piece in pieces))
    start = 0
    for piece in pieces:
        for box in piece.source:
            packed[start : start + box.numel].view(box.sizes).copy_(box.view(local))
            start += box.numel
    return packed


def unpack(received: torch.Tensor, pieces: Sequence[Piece], out: torch.Tensor) -> None:
    """Copy received pieces, flat and one after the other, into their blocks of the new local tensor."""
    start = 0
    for piece in pieces:
        for box in piece.target:
            box.view(out).copy_(received[start : start + box.numel].view(box.sizes))
            start += box.numel


def unpack_gathered(received: torch.Tensor, exchange: Exchange, out: torch.Tensor) -> None:
    """Copy gathered local tensors, each in its sender's order, into their blocks of the new local tensor."""
    start = 0
    for piece, region in zip(exchange.receives, exchange.peer_sources):
        segment = received[start : start + region.numel].view(region.local_shape)
        for source, target in zip(piece.source, piece.target):
            target.view(out).copy_(source.view(segment))
        start += math.prod(region.local_shape)
