"""Moves the parts of matrices to their owners and the results back, while other matrices are computed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import AxisGroup, Pending, all_to_all_v, axis_group
from vescale.optim._state_loading import Coordinate
from vescale.placements import Box, Region, local_region

# In which order the matrices of a model are gathered, computed and scattered: the same on all ranks.


@dataclass(frozen=True, eq=False)
class TensorPlace:
    """Where a parameter is; ``mesh`` None: this rank alone has it, whole."""

    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] = ()


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """One matrix and who computes it.

    Attributes:
        parameter: number of the parameter in the optimizer.
        block: number of the matrix in the parameter.
        box: its elements in the global tensor.
        rows, columns: of the matrix.
        cost: of computing it.
        place: of its parameter.
        owner: coordinate of its owner; 0 on axes along which every rank computes it.
        axes: mesh axes along which its parts travel to the owner.
        replicas: mesh axes along which the result is copied.
        repeated: mesh axes along which every rank computes it.
        sends, receives: dtypes of what travels to the owner, and back.
    """

    parameter: int
    block: int
    box: Box
    rows: int
    columns: int
    cost: int
    place: TensorPlace
    owner: Coordinate = ()
    axes: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    repeated: tuple[int, ...] = ()
    sends: torch.dtype = torch.float32
    receives: torch.dtype = torch.float32

    def is_owner(self, coordinate: Sequence[int]) -> bool:
        return all(
            own == place or axis in self.repeated for axis, (own, place) in enumerate(zip(self.owner, coordinate))
        )


@dataclass(frozen=True, eq=False)
class MatrixBucket:
    """Matrices that travel together, between the ranks that differ on the round's axes only.

    ``replica``: where these ranks are on the axes along which results are copied.
    """

    replica: Coordinate
    matrices: tuple[OwnedMatrix, ...]


@dataclass(frozen=True, eq=False)
class MatrixRound:
    """Buckets of one kind that are on their way at the same time, each between other ranks; what this rank has part in.

    ``place`` stands for the places of all matrices: they have its mesh.
    """

    place: TensorPlace
    axes: tuple[int, ...]
    replicas: tuple[int, ...]
    buckets: tuple[MatrixBucket, ...]
    sends: torch.dtype
    receives: torch.dtype


def plan_rounds(matrices: Sequence[OwnedMatrix], bucket_bytes: int) -> list[list[MatrixRound]]:
    """The rounds that this rank takes part in, by kind: rounds of one kind follow each other closely, kinds do not.

    An owner's matrices come in the order of the list. The first of all owners travel together, then the second, and so
    on, several of these waves in one bucket while no owner gets more than ``bucket_bytes``: all owners compute at the
    same time, and while one bucket is computed another one travels.

    Pure: ranks that share a round get it alike, for they have the same matrices in the same order.
    """
    kinds: dict[object, dict[Coordinate, list[OwnedMatrix]]] = {}
    for matrix in matrices:
        mesh = matrix.place.mesh
        coordinate = None if mesh is None else mesh.get_coordinate()
        if mesh is not None and coordinate is None:
            continue
        key = (id(mesh), matrix.axes, matrix.replicas, matrix.repeated, matrix.sends, matrix.receives)
        slices = kinds.setdefault(key, {})
        if coordinate is not None and not _is_near(matrix, coordinate):
            continue  # between other ranks; the kind keeps its place in the order
        slices.setdefault(tuple(matrix.owner[axis] for axis in matrix.replicas), []).append(matrix)
    return [_rounds(slices, bucket_bytes) for slices in kinds.values() if slices]


def _is_near(matrix: OwnedMatrix, coordinate: Sequence[int]) -> bool:
    """Whether this rank sends a part, owns it, or gets a copy of the result."""
    passing = {*matrix.axes, *matrix.replicas, *matrix.repeated}
    return all(axis in passing or own == matrix.owner[axis] for axis, own in enumerate(coordinate))


def _rounds(slices: dict[Coordinate, list[OwnedMatrix]], bucket_bytes: int) -> list[MatrixRound]:
    cut = {replica: _buckets(matrices, bucket_bytes) for replica, matrices in sorted(slices.items())}
    first = next(iter(slices.values()))[0]
    rounds = []
    for number in range(max(map(len, cut.values()))):
        buckets = tuple(MatrixBucket(replica, found[number]) for replica, found in cut.items() if number < len(found))
        rounds.append(MatrixRound(first.place, first.axes, first.replicas, buckets, first.sends, first.receives))
    return rounds


def _buckets(matrices: Sequence[OwnedMatrix], bucket_bytes: int) -> list[tuple[OwnedMatrix, ...]]:
    waves: dict[Coordinate, list[OwnedMatrix]] = defaultdict(list)
    for matrix in matrices:
        waves[matrix.owner].append(matrix)
    found: list[tuple[OwnedMatrix, ...]] = []
    together: list[OwnedMatrix] = []
    filled: dict[Coordinate, int] = defaultdict(int)
    for number in range(max(map(len, waves.values()))):
        wave = [own[number] for own in waves.values() if number < len(own)]
        sizes = {matrix.owner: math.prod(matrix.box.sizes) * matrix.sends.itemsize for matrix in wave}
        if together and any(filled[owner] + size > bucket_bytes for owner, size in sizes.items()):
            found.append(tuple(together))
            together, filled = [], defaultdict(int)
        together += wave
        for owner, size in sizes.items():
            filled[owner] += size
    return [*found, tuple(together)]


# Which blocks of local tensors a rank sends, receives, keeps and copies in one round: index arithmetic, done once.


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


class MatrixStep:
    """What an optimizer does with its matrices; :class:`MatrixExchange` calls it."""

    def part(self, parameter: int) -> torch.Tensor:
        """This rank's local tensor of what travels to the owners. Asked for wherever the parameter has a part on this rank,
        before the first update of the parameter comes back."""
        raise NotImplementedError

    def release(self, parameter: int) -> None:
        """:meth:`part` is not asked for again."""

    def compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> Sequence[torch.Tensor]:
        """The updates of matrices that this rank owns. Each is given, and returned, in the shape of its box."""
        raise NotImplementedError

    def apply(self, matrix: OwnedMatrix, block: Box, update: torch.Tensor) -> None:
        """Take the update of ``block``, the part of the matrix that this rank's local tensor holds."""
        raise NotImplementedError


class MatrixExchange:
    """Rounds of matrices with the index arithmetic of this rank's part, which is done once.

    Communication of each round: one uneven all-to-all to the owners and one back; one more along replicas. Every
    element goes to its matrix's owner once, and comes back once to each rank that holds it. Rounds along no axes have
    none.
    """

    def __init__(self, kinds: Sequence[Sequence[MatrixRound]], device: torch.device, requester: str) -> None:
        self._kinds = [[(each, round_parts(each)) for each in rounds] for rounds in kinds]
        self._device, self._requester = device, requester
        self._last: dict[int, RoundParts] = {}
        for rounds in self._kinds:
            for _, parts in rounds:
                for parameter in parts.parameters:
                    self._last[parameter] = parts

    def received_bytes(self) -> dict[int, int]:
        """By parameter, the bytes that this rank receives in a step."""
        found: dict[int, int] = {}
        for rounds in self._kinds:
            for round_, parts in rounds:
                gathered, returned = round_.sends.itemsize, round_.receives.itemsize
                for each, size in ((parts.receives, gathered), (parts.sends, returned), (parts.takes, returned)):
                    for part in each:
                        number = part.matrix.parameter
                        found[number] = found.get(number, 0) + part.held.numel * size
        return found

    def run(self, step: MatrixStep) -> None:
        """One step of an optimizer.

        The gather of the next round and the scatter of the last one run while a round is computed. Ranks that share a
        process group start its collectives in the same order: each kind's rounds end before the next kind's begin.
        """
        for rounds in self._kinds:
            running = [_RunningRound(*each, step, self._device, self._requester, self._last) for each in rounds]
            running[0].gather()
            for number, current in enumerate(running):
                if number + 1 < len(running):
                    running[number + 1].gather()
                current.compute()
                if number:
                    running[number - 1].take_scattered()
                if number > 1:
                    running[number - 2].take_copied()
            running[-1].take_scattered()
            for last in running[-2:]:
                last.take_copied()


class _RunningRound:
    """This rank's part of a round in one step; the methods in the order in which they are called."""

    def __init__(
        self,
        round_: MatrixRound,
        parts: RoundParts,
        step: MatrixStep,
        device: torch.device,
        requester: str,
        last: dict[int, RoundParts],
    ) -> None:
        self._round, self._parts, self._step = round_, parts, step
        self._device, self._requester, self._last = device, requester, last
        self._gathered: Pending | None = None
        self._scattered: Pending | None = None
        self._copied: Pending | None = None

    def gather(self) -> None:
        """Start to send this rank's parts to the owners."""
        parts, step, dtype = self._parts, self._step, self._round.sends
        self._whole = {m: torch.empty(m.box.sizes, dtype=dtype, device=self._device) for m in parts.owned}
        for part in parts.kept:
            part.within.view(self._whole[part.matrix]).copy_(part.held.view(step.part(part.matrix.parameter)))
        if parts.group is not None:
            sent = self._packed(((part.held.view(step.part(part.matrix.parameter))) for part in parts.sends), dtype)
            self._gathered = all_to_all_v(
                sent, parts.send_sizes, parts.receive_sizes, parts.group.group, requester=f"{self._requester}: gather"
            )
        for parameter in sorted(parts.parameters):
            step.part(parameter)
            if self._last[parameter] is parts:
                step.release(parameter)

    def compute(self) -> None:
        """Compute this rank's matrices and start to send the results."""
        parts = self._parts
        if self._gathered is not None:
            _unpack(
                self._gathered.wait(),
                parts.receives,
                lambda p, values: p.within.view(self._whole[p.matrix]).copy_(values),
            )
        self._updates = dict(zip(parts.owned, self._step.compute(list(self._whole.items())) if parts.owned else ()))
        self._whole, self._gathered = {}, None
        if parts.group is not None:
            sent = self._packed(
                (part.within.view(self._updates[part.matrix]) for part in parts.receives), self._round.receives
            )
            self._scattered = all_to_all_v(
                sent, parts.receive_sizes, parts.send_sizes, parts.group.group, requester=f"{self._requester}: scatter"
            )

    def take_scattered(self) -> None:
        """Apply the results of this rank's bucket, and start to copy them to the replicas."""
        parts, found = self._parts, []

        def take(part: Part, values: torch.Tensor) -> None:
            self._step.apply(part.matrix, part.held, values)
            found.append(values)

        for part in parts.kept:
            take(part, part.within.view(self._updates[part.matrix]))
        if self._scattered is not None:
            _unpack(self._scattered.wait(), parts.sends, take)
        if parts.copies is not None:
            others = parts.copies.size - 1
            own = self._packed((found[index] for index in parts.copied), self._round.receives)
            sizes = [own.numel()] * parts.copies.size
            sizes[parts.copies.index] = 0
            self._copied = all_to_all_v(
                own.repeat(others),
                sizes,
                parts.take_sizes,
                parts.copies.group,
                requester=f"{self._requester}: replicas",
            )
        self._updates, self._scattered = {}, None

    def take_copied(self) -> None:
        """Apply the results that other replicas have computed."""
        if self._copied is not None:
            _unpack(
                self._copied.wait(), self._parts.takes, lambda p, values: self._step.apply(p.matrix, p.held, values)
            )
        self._copied = None

    def _packed(self, pieces: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The pieces one after the other, flat."""
        flat = [piece.reshape(-1).to(dtype) for piece in pieces]
        return torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=self._device)


def _unpack(flat: torch.Tensor, parts: Sequence[Part], take: Callable[[Part, torch.Tensor], object]) -> None:
    start = 0
    for part in parts:
        take(part, flat[start : start + part.held.numel].view(part.held.sizes))
        start += part.held.numel
