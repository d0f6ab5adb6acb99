"""In which order the matrices of a model are gathered, computed and scattered: the same on all ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.optim._holders import Coordinate
from vescale.placements import Box

__all__ = ["MatrixBucket", "MatrixRound", "OwnedMatrix", "TensorPlace", "plan_rounds"]


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
