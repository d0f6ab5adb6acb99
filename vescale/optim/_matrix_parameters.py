"""The parameters of an optimizer with owners: where each is, which matrices it has, who owns them."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.compat import local_of, spec_of, without_modes
from vescale.errors import OptimizerError
from vescale.optim._matrix_blocks import MatrixGrid
from vescale.optim._matrix_exchange import OwnedMatrix, TensorPlace
from vescale.optim._report import compare_parameters, shown_names
from vescale.optim._state_loading import Coordinate, holdings, replica_axes

# Which rank computes which matrix: a pure function of shapes, placements and meshes, the same on all ranks.


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


@dataclass(eq=False)
class MatrixParameter:
    """One parameter of an optimizer.

    Attributes:
        number: as the optimizer counts the parameters that it has been given.
        name: of :func:`~vescale.optim._report.shown_names`.
        tensor: the parameter.
        group: its group's options.
        place: its shape, mesh and placements.
        grid: its matrices; None where it is updated element by element.
        matrices: with their owners.
    """

    number: int
    name: str
    tensor: torch.Tensor
    group: dict[str, Any]
    place: TensorPlace
    grid: MatrixGrid | None = None
    matrices: list[OwnedMatrix] = field(default_factory=list)

    @property
    def local(self) -> torch.Tensor:
        return local_tensor(self.tensor)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that hold it; none for a plain tensor."""
        return () if self.place.mesh is None else _mesh_ranks(self.place.mesh).ranks

    @property
    def travels(self) -> bool:
        """Whether ranks send each other something of its matrices in a step; the same on all ranks that hold it."""
        mesh = self.place.mesh
        return mesh is not None and any(mesh.size(axis) > 1 for m in self.matrices for axis in (*m.axes, *m.replicas))

    def describe(self) -> str:
        """What must be the same on every rank that holds it."""
        mesh = self.place.mesh
        where = "" if mesh is None else f" as {list(map(str, self.place.placements))} on {tuple(mesh.shape)}"
        options = {
            key: value for key, value in self.group.items() if key not in ("params", "param_names", "lr", "initial_lr")
        }
        return f"{tuple(self.place.shape)} {self.tensor.dtype}{where} with {sorted(map(str, options.items()))}"


@dataclass(frozen=True)
class Algorithm:
    """What owners are planned by: matrices of a parameter, the cost of one, the kinds that are due together, and the dtypes
    that travel to the owner and back. ``announce`` is called before new parameters are given to owners."""

    grid: Callable[[MatrixParameter], MatrixGrid | None]
    cost: Callable[[MatrixParameter, int, int], int]
    kinds: Callable[[Sequence[OwnedMatrix]], list[int]]
    dtypes: Callable[[MatrixParameter], tuple[torch.dtype, torch.dtype]]
    announce: Callable[[Sequence[MatrixParameter]], None]


class MatrixParameters:
    """All parameters of an optimizer, as :meth:`follow` finds them in its groups. Owners stay where they are when others
    come and go."""

    def __init__(self, algorithm: Algorithm, split_replicas: bool) -> None:
        self.by_number: dict[int, MatrixParameter] = {}
        self._algorithm, self._split_replicas = algorithm, split_replicas
        self._costs: dict[frozenset[int], dict[int, int]] = {}  # of matrices by the ranks of their mesh: by rank
        self._next_number = 0

    @property
    def all(self) -> list[MatrixParameter]:
        return list(self.by_number.values())

    @property
    def matrices(self) -> list[OwnedMatrix]:
        return [matrix for parameter in self.all for matrix in parameter.matrices]

    @property
    def ownership(self) -> Ownership:
        costs: Counter[int] = Counter()
        for found in self._costs.values():
            for rank, cost in found.items():
                costs[rank] += cost
        return Ownership(tuple(matrix.owner for matrix in self.matrices), dict(costs))

    def follow(
        self,
        groups: Sequence[dict[str, Any]],
        replaced: Mapping[torch.Tensor, torch.Tensor] = MappingProxyType({}),
        *,
        announces: bool = False,
        check: Callable[[MatrixParameter], None] = lambda _: None,
    ) -> list[MatrixParameter]:
        """Have the parameters of ``groups``: plan those that are new or have other matrices now, forget those that are gone.
        Returns those that were planned.

        Ranks of a mesh then compare what they have been given, through the store: no collective.

        Args:
            groups: as they are now.
            replaced: a new parameter by the one whose place it has taken; its number, which decides when work is due, is
                that of the other one.
            announces: that all ranks have been given parameters, this one perhaps none; else if it has new ones.
            check: called with each parameter before anything is final.

        Raises ValueError on every rank if ranks differ, or for a parameter that has no owner; nothing is changed then.
        """
        before, known = self.by_number, {parameter.tensor: parameter for parameter in self.all}
        numbers = {replaced[tensor]: old.number for tensor, old in known.items() if tensor in replaced}
        costs = {ranks: dict(found) for ranks, found in self._costs.items()}
        found: dict[int, MatrixParameter] = {}
        new: list[MatrixParameter] = []
        options = [(old, old.group, old.name) for old in known.values()]
        following = self._next_number
        try:
            for group, names in zip(groups, shown_names(groups)):
                for name, tensor in zip(names, group["params"]):
                    parameter = MatrixParameter(following, name, tensor, group, _place(tensor, name))
                    parameter.grid = self._algorithm.grid(parameter)
                    old = known.get(tensor)
                    if old is not None and self._are_planned_alike(old, parameter):
                        old.group, old.name = group, name
                        parameter = old
                    else:
                        new.append(parameter)
                        parameter.number = numbers.get(tensor, following)
                        following += parameter.number == following
                    found[parameter.number] = parameter
            gone = [old for old in before.values() if found.get(old.number) is not old]
            self.by_number = found
            for old in gone:
                for matrix in old.matrices if old.place.mesh is not None else ():
                    for rank in owning_ranks(_placed(matrix), matrix.owner):
                        self._costs[frozenset(old.ranks)][rank] -= matrix.cost
            if new or gone or announces:
                added = [parameter for parameter in new if parameter.tensor not in numbers]
                with without_modes():
                    compare_parameters([(p.ranks, p.name, p.describe()) for p in self.all])
                    if added or announces:
                        self._algorithm.announce(added)
                    self._assign(new)
            for parameter in self.all:
                check(parameter)
        except BaseException:
            self.by_number, self._costs = before, costs
            for old, group, name in options:
                old.group, old.name = group, name
            raise
        self._next_number = following
        return new

    def _are_planned_alike(self, one: MatrixParameter, other: MatrixParameter) -> bool:
        found, expected = ((p.place.shape, p.place.mesh, p.place.placements, p.grid) for p in (one, other))
        if found != expected:
            return False
        return one.grid is None or all(
            (matrix.sends, matrix.receives) == self._algorithm.dtypes(other) for matrix in one.matrices
        )

    def _assign(self, parameters: Sequence[MatrixParameter]) -> None:
        made: list[OwnedMatrix] = []
        placed: list[PlacedMatrix] = []
        for parameter in parameters:
            grid, place, mesh = parameter.grid, parameter.place, parameter.place.mesh
            if grid is None:
                continue
            ranks = None if mesh is None else _mesh_ranks(mesh)
            held = () if ranks is None else holdings(grid, place.placements, ranks.shape)
            replicas = () if ranks is None else replica_axes(place.placements, ranks.shape)
            copied, repeated = (replicas, ()) if self._split_replicas else ((), replicas)
            sends, receives = self._algorithm.dtypes(parameter)
            for block, box in enumerate(grid.boxes):
                rows, columns = grid.matrix_shape(box.sizes)
                cost = self._algorithm.cost(parameter, rows, columns)
                matrix = OwnedMatrix(
                    parameter.number, block, box, rows, columns, cost, place, (), (), copied, repeated, sends, receives
                )  # fmt: skip
                made.append(matrix)
                if ranks is not None:
                    where = held[block]
                    placed.append(PlacedMatrix(cost, ranks, where.fixed, where.is_kept, repeated))
        kinds = self._algorithm.kinds(made)
        on_meshes = [index for index, matrix in enumerate(made) if matrix.place.mesh is not None]
        placed = [replace(each, kind=kinds[index]) for each, index in zip(placed, on_meshes)]
        together: dict[frozenset[int], list[int]] = defaultdict(list)
        for number, each in enumerate(placed):
            together[each.mesh.members].append(number)
        for members in sorted(together, key=lambda each: (-len(each), sorted(each))):
            numbers = together[members]
            before = self._known_to_all(members)
            ownership = assign_owners([placed[number] for number in numbers], before)
            own = self._costs.setdefault(members, dict.fromkeys(members, 0))
            for rank in members:
                own[rank] += ownership.costs[rank] - before[rank]
            for number, owner in zip(numbers, ownership.coordinates):
                index = on_meshes[number]
                made[index] = _owned(made[index], owner, placed[number].fixed)
        for matrix in made:
            self.by_number[matrix.parameter].matrices.append(matrix)

    def _known_to_all(self, ranks: frozenset[int]) -> dict[int, int]:
        """What each rank has to compute, as far as all of ``ranks`` know it, who plan alike: matrices on all of them. One of
        them may have others on meshes that the rest is not part of."""
        return {
            rank: sum(found[rank] for members, found in self._costs.items() if members >= ranks)
            for rank in sorted(ranks)
        }


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares its memory."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _placed(matrix: OwnedMatrix) -> PlacedMatrix:
    """As owners see one that has an owner already."""
    mesh = matrix.place.mesh
    assert mesh is not None
    return PlacedMatrix(matrix.cost, _mesh_ranks(mesh), (None,) * mesh.ndim, repeated_axes=matrix.repeated)


def _owned(matrix: OwnedMatrix, owner: tuple[int, ...], fixed: Sequence[int | None]) -> OwnedMatrix:
    """With its owner, and the axes along which its parts are, or the owner is, at another coordinate."""
    elsewhere = (*matrix.replicas, *matrix.repeated)
    mesh = matrix.place.mesh
    assert mesh is not None
    axes = tuple(
        axis
        for axis, place in enumerate(fixed)
        if axis not in elsewhere and mesh.size(axis) > 1 and place != owner[axis]
    )
    return OwnedMatrix(
        matrix.parameter, matrix.block, matrix.box, matrix.rows, matrix.columns, matrix.cost, matrix.place, owner, axes,
        matrix.replicas, matrix.repeated, matrix.sends, matrix.receives,
    )  # fmt: skip


def _place(tensor: torch.Tensor, name: str) -> TensorPlace:
    if not isinstance(tensor, DTensor):
        return TensorPlace(tuple(tensor.shape))
    spec = spec_of(tensor)
    if spec.mesh.get_coordinate() is None:
        raise OptimizerError(
            f"parameter {name!r} is on {spec.mesh}, which rank {dist.get_rank()} is not part of; pass only the "
            "parameters of a rank's own meshes"
        )
    if any(placement.is_partial() for placement in spec.placements):
        raise OptimizerError(
            f"parameter {name!r} has the placements {spec.placements}: a parameter cannot be a pending sum; "
            "redistribute it first"
        )
    return TensorPlace(tuple(tensor.shape), spec.mesh, tuple(spec.placements))


def _mesh_ranks(mesh: DeviceMesh) -> MeshRanks:
    return MeshRanks(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))
