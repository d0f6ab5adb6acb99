"""The parameters of an optimizer with owners: where each is, which matrices it has, who owns them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from vescale.optim._ownership import MeshRanks, Ownership, PlacedMatrix, assign_owners, owning_ranks
from vescale.optim._report import compare_parameters, shown_names
from vescale.optim._state_loading import holdings, replica_axes


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
        placed = [_of_kind(each, kinds[index]) for each, index in zip(placed, on_meshes)]
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


def _of_kind(placed: PlacedMatrix, kind: int) -> PlacedMatrix:
    return PlacedMatrix(placed.cost, placed.mesh, placed.fixed, placed.is_kept, placed.repeated_axes, kind)


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
