"""Which blocks of local tensors a rank sends, receives, keeps and copies in one round: index arithmetic, done once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale.comm import AxisGroup, axis_group
from vescale.optim._matrix_schedule import MatrixBucket, MatrixRound, OwnedMatrix, TensorPlace
from vescale.placements import Box, Region, local_region

__all__ = ["Part", "RoundParts", "round_parts"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A block of a matrix that some rank holds: ``held`` locates it in its local tensor, ``within`` in the matrix."""

    matrix: OwnedMatrix
    held: Box
    within: Box


@dataclass(frozen=True, eq=False)
class RoundParts:
    """One rank's part of a round.

    Attributes:
        group: the ranks between which parts travel; None: nothing does.
        owned: the matrices that this rank computes.
        kept: of these, the parts that this rank holds.
        sends: the parts that it holds of other ranks' matrices, by owner in group order; ``send_sizes`` elements each.
        receives: the parts of its matrices that others hold, by holder in group order; ``receive_sizes`` elements each.
        copies: the ranks that hold the same as this one; None: there are no others, or each computes for itself.
        copied: where the parts of this rank's own bucket are among ``kept`` and ``sends`` together, in the bucket's
        order. takes: the parts of what other replicas compute, by replica in group order; ``take_sizes`` elements each.
    """

    group: AxisGroup | None
    owned: tuple[OwnedMatrix, ...]
    kept: tuple[Part, ...]
    sends: tuple[Part, ...]
    send_sizes: tuple[int, ...]
    receives: tuple[Part, ...]
    receive_sizes: tuple[int, ...]
    copies: AxisGroup | None
    copied: tuple[int, ...]
    takes: tuple[Part, ...]
    take_sizes: tuple[int, ...]

    @property
    def parameters(self) -> set[int]:
        """Those of which this rank holds parts."""
        return {part.matrix.parameter for part in (*self.kept, *self.sends, *self.takes)}


def round_parts(round_: MatrixRound) -> RoundParts:
    """This rank's part. Makes the process groups of the round on first use (a rendezvous of their ranks)."""
    mesh = round_.place.mesh
    if mesh is None:
        (bucket,) = round_.buckets
        kept = tuple(part for matrix in bucket.matrices for part in _parts(matrix, ()))
        return RoundParts(None, bucket.matrices, kept, (), (), (), (), None, (), (), ())
    own = tuple(mesh.get_coordinate() or ())
    group = axis_group(mesh, round_.axes) if round_.axes else None
    copies = axis_group(mesh, round_.replicas) if round_.replicas else None
    bucket = _bucket_at(round_, own)
    owned = tuple(matrix for matrix in bucket.matrices if matrix.is_owner(own))
    kept = tuple(part for matrix in owned for part in _parts(matrix, own))
    sends: list[Part] = []
    receives: list[Part] = []
    send_sizes, receive_sizes = [], []
    for peer in group.coordinates if group is not None else ():
        there = () if peer == own else tuple(m for m in bucket.matrices if m.is_owner(peer))
        out = [part for matrix in there for part in _parts(matrix, own)]
        back = [] if peer == own else [part for matrix in owned for part in _parts(matrix, peer)]
        sends += out
        receives += back
        send_sizes.append(_numel(out))
        receive_sizes.append(_numel(back))
    number = {(part.matrix, part.held.offset): index for index, part in enumerate((*kept, *sends))}
    copied: tuple[int, ...] = ()
    takes: list[Part] = []
    take_sizes = []
    if copies is not None:
        copied = tuple(number[m, part.held.offset] for m in bucket.matrices for part in _parts(m, own))
        for peer in copies.coordinates:
            there = () if peer == own else _bucket_at(round_, peer).matrices
            found = [part for matrix in there for part in _parts(matrix, own)]
            takes += found
            take_sizes.append(_numel(found))
    return RoundParts(
        group, owned, kept, tuple(sends), tuple(send_sizes), tuple(receives), tuple(receive_sizes), copies, copied,
        tuple(takes), tuple(take_sizes),
    )  # fmt: skip


def _bucket_at(round_: MatrixRound, coordinate: Sequence[int]) -> MatrixBucket:
    replica = tuple(coordinate[axis] for axis in round_.replicas)
    return next((b for b in round_.buckets if b.replica == replica), MatrixBucket(replica, ()))


def _parts(matrix: OwnedMatrix, holder: Sequence[int]) -> list[Part]:
    """The blocks of a matrix in the local tensor of the rank at ``holder``, in local order."""
    pairs = [box.intersect(matrix.box) for box in _region(matrix.place, holder).boxes]
    return [Part(matrix, *pair) for pair in pairs if pair is not None]


def _region(place: TensorPlace, coordinate: Sequence[int]) -> Region:
    if place.mesh is None:
        return Region(place.shape, tuple(((0, size),) for size in place.shape))
    return local_region(place.shape, place.placements, tuple(place.mesh.shape), coordinate)


def _numel(parts: Sequence[Part]) -> int:
    return sum(part.held.numel for part in parts)
