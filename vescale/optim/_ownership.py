"""Which rank computes which matrix: a pure function of shapes, placements and meshes, the same on all ranks."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vescale.optim._state_loading import Coordinate


@dataclass(frozen=True)
class MeshRanks:
    """A mesh as values: ``ranks`` are global ranks in row-major order of coordinates."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Kept: a mesh is looked up for every matrix."""
        return hash((self.shape, self.ranks))

    @functools.cached_property
    def members(self) -> frozenset[int]:
        return frozenset(self.ranks)

    def rank(self, coordinate: Sequence[int]) -> int:
        index = 0
        for size, place in zip(self.shape, coordinate):
            index = index * size + place
        return self.ranks[index]


@dataclass(frozen=True)
class PlacedMatrix:
    """A matrix to be given to an owner.

    Attributes:
        cost: of computing it, in any unit.
        mesh: the ranks that hold it.
        fixed: for each axis the coordinate that holds all of it, or None (:class:`~vescale.optim._state_loading.Holding`).
        is_kept: it stays with its holder, whatever the balance.
        repeated_axes: axes along which every rank computes it for itself.
        kind: matrices of one kind are also balanced among themselves (what is due in the same step).
    """

    cost: int
    mesh: MeshRanks
    fixed: tuple[int | None, ...]
    is_kept: bool = False
    repeated_axes: tuple[int, ...] = ()
    kind: int = 0


@dataclass(frozen=True)
class Ownership:
    """Owners of matrices.

    Attributes:
        coordinates: of each matrix's owner on its mesh; 0 on axes that repeat it.
        costs: by global rank, what each computes.
    """

    coordinates: tuple[Coordinate, ...]
    costs: dict[int, int] = field(hash=False)

    @property
    def mean_cost(self) -> float:
        return sum(self.costs.values()) / max(1, len(self.costs))

    @property
    def imbalance(self) -> float:
        """The largest cost of a rank by the mean; 1.0 where nothing is computed."""
        return max(self.costs.values(), default=0) / self.mean_cost if self.mean_cost else 1.0


BALANCE = 1.15
"""The largest cost of a rank by the mean that keeping matrices where they are may cause."""


def assign_owners(matrices: Sequence[PlacedMatrix], before: Mapping[int, int] | None = None) -> Ownership:
    """Give each matrix to one rank of its mesh, so that no rank computes much more than the mean.

    Costly matrices first, each to the rank with the least to do (LPT): the largest cost of a rank is at most 4/3 of
    what is possible, and the mean plus the smallest matrix on that rank at most. A matrix that one rank holds whole, or
    the ranks along few axes hold together, stays there while that leaves their cost below the mean of all; it then
    costs no communication, or less. If that ends worse than ``BALANCE`` times the mean, the places of matrices are not
    regarded. Matrices that the layout keeps whole stay where they are in any case. Ties go to the first rank of the
    mesh.

    ``before``: what ranks compute already, by global rank; :attr:`Ownership.costs` includes it.
    """
    near = _assign(matrices, before or {}, local=True)
    if near.imbalance <= BALANCE:
        return near
    far = _assign(matrices, before or {}, local=False)
    return far if far.imbalance < near.imbalance else near


def _assign(matrices: Sequence[PlacedMatrix], before: Mapping[int, int], local: bool) -> Ownership:
    costs = {rank: 0 for mesh in dict.fromkeys(m.mesh for m in matrices) for rank in mesh.ranks} | dict(before)
    by_kind: dict[tuple[int, int], int] = {}
    total = sum(before.values())
    for matrix in matrices:
        repeats = 1
        for axis in matrix.repeated_axes:
            repeats *= matrix.mesh.shape[axis]
        total += matrix.cost * repeats
    mean = total / max(1, len(costs))
    owners: list[Coordinate] = [()] * len(matrices)
    order = sorted(range(len(matrices)), key=lambda i: (not matrices[i].is_kept, -matrices[i].cost, i))
    candidates: dict[object, _Candidates] = {}
    for index in order:
        matrix = matrices[index]
        nowhere: tuple[int | None, ...] = (None,) * len(matrix.fixed)
        choices = [matrix.fixed] if matrix.is_kept else [matrix.fixed, nowhere] if local else [nowhere]
        for place in dict.fromkeys(choices):
            key = (matrix.mesh, place, matrix.repeated_axes, matrix.kind)
            if key not in candidates:
                candidates[key] = _Candidates(matrix, place, costs, by_kind)
            owner, load = candidates[key].least()
            if place == choices[-1] or load + matrix.cost <= mean:
                break
        owners[index] = owner
        for rank in owning_ranks(matrix, owner):
            costs[rank] += matrix.cost
            by_kind[rank, matrix.kind] = by_kind.get((rank, matrix.kind), 0) + matrix.cost
    return Ownership(tuple(owners), costs)


def owning_ranks(matrix: PlacedMatrix, coordinate: Coordinate) -> list[int]:
    """The ranks that compute a matrix whose owner is at ``coordinate``: those along the axes that repeat it."""
    if not matrix.repeated_axes:
        return [matrix.mesh.rank(coordinate)]
    choices = [
        range(size) if axis in matrix.repeated_axes else (coordinate[axis],)
        for axis, size in enumerate(matrix.mesh.shape)
    ]
    return [matrix.mesh.rank(place) for place in itertools.product(*choices)]


class _Candidates:
    """The ranks that one kind of matrix may go to, the least busy first: by what they compute of the kind, then in all."""

    def __init__(
        self,
        matrix: PlacedMatrix,
        fixed: Sequence[int | None],
        costs: dict[int, int],
        by_kind: dict[tuple[int, int], int],
    ) -> None:
        self._costs, self._by_kind, self._kind = costs, by_kind, matrix.kind
        choices = [
            (0,) if axis in matrix.repeated_axes else range(size) if place is None else (place,)
            for axis, (size, place) in enumerate(zip(matrix.mesh.shape, fixed))
        ]
        self._places = list(itertools.product(*choices))
        self._teams = [owning_ranks(matrix, place) for place in self._places]
        self._heap = [(*self._load(number), number) for number in range(len(self._places))]
        heapq.heapify(self._heap)

    def _load(self, number: int) -> tuple[int, int]:
        team = self._teams[number]
        if len(team) == 1:
            return self._by_kind.get((team[0], self._kind), 0), self._costs[team[0]]
        return (
            max(self._by_kind.get((rank, self._kind), 0) for rank in team),
            max(self._costs[rank] for rank in team),
        )

    def least(self) -> tuple[Coordinate, int]:
        """(coordinate, cost in all) of the least busy one."""
        while True:  # loads only grow, so that an entry that is still right is the least
            *known, number = self._heap[0]
            now = self._load(number)
            if tuple(known) == now:
                return self._places[number], now[1]
            heapq.heapreplace(self._heap, (*now, number))
