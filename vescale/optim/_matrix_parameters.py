"""The parameters of an optimizer with owners: where each is, which matrices it has, who owns them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.comm import Consensus, compare_descriptions
from vescale.compat import local_of, spec_of, without_modes
from vescale.errors import OptimizerParameterError
from vescale.optim._holders import holdings, replica_axes
from vescale.optim._matrix_blocks import MatrixGrid
from vescale.optim._matrix_schedule import OwnedMatrix, TensorPlace
from vescale.optim._ownership import MeshRanks, Ownership, PlacedMatrix, assign_owners

__all__ = ["Algorithm", "MatrixParameter", "MatrixParameters", "local_tensor"]


@dataclass(eq=False)
class MatrixParameter:
    """One parameter of an optimizer.

    Attributes:
        number: its place among all parameters of the optimizer.
        name: of ``param_names`` of its group, else its place.
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
    that travel to the owner and back."""

    grid: Callable[[MatrixParameter], MatrixGrid | None]
    cost: Callable[[MatrixParameter, int, int], int]
    kinds: Callable[[Sequence[OwnedMatrix]], list[int]]
    dtypes: Callable[[MatrixParameter], tuple[torch.dtype, torch.dtype]]


class MatrixParameters:
    """All parameters of an optimizer in the order of its groups. Those that are added later leave owners as they are."""

    def __init__(self, algorithm: Algorithm, split_replicas: bool) -> None:
        self.all: list[MatrixParameter] = []
        self.number_of: dict[torch.Tensor, int] = {}
        self._algorithm, self._split_replicas = algorithm, split_replicas
        self._costs: dict[int, int] = {}

    @property
    def matrices(self) -> list[OwnedMatrix]:
        return [matrix for parameter in self.all for matrix in parameter.matrices]

    @property
    def ownership(self) -> Ownership:
        return Ownership(tuple(matrix.owner for matrix in self.matrices), dict(self._costs))

    def take(self, groups: Sequence[dict[str, Any]]) -> list[MatrixParameter]:
        """Plan the parameters of ``groups`` that are new, and return them.

        Ranks of a mesh compare what they have been given, through the store: no collective.

        Raises ValueError on every rank if it differs, or for a parameter that has no owner.
        """
        new = []
        for position, group in enumerate(groups):
            names = group.get("param_names") or [
                f"group {position}, parameter {i}" for i in range(len(group["params"]))
            ]
            for name, tensor in zip(names, group["params"]):
                if tensor not in self.number_of:
                    parameter = MatrixParameter(len(self.all), name, tensor, group, _place(tensor, name))
                    parameter.grid = self._algorithm.grid(parameter)
                    self.number_of[tensor] = parameter.number
                    self.all.append(parameter)
                    new.append(parameter)
        with without_modes():
            _compare(new)
            self._assign(new)
        return new

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
        ownership = assign_owners(placed, self._costs)
        self._costs = ownership.costs
        for index, owner, each in zip(on_meshes, ownership.coordinates, placed):
            made[index] = _owned(made[index], owner, each.fixed)
        for matrix in made:
            self.all[matrix.parameter].matrices.append(matrix)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, which shares its memory."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def _of_kind(placed: PlacedMatrix, kind: int) -> PlacedMatrix:
    return PlacedMatrix(placed.cost, placed.mesh, placed.fixed, placed.is_kept, placed.repeated_axes, kind)


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
        raise OptimizerParameterError(
            f"parameter {name!r} is on {spec.mesh}, which rank {dist.get_rank()} is not part of; give every rank the "
            "parameters of its own meshes only"
        )
    if any(placement.is_partial() for placement in spec.placements):
        raise OptimizerParameterError(
            f"parameter {name!r} has the placements {spec.placements}: a pending sum cannot be a parameter"
        )
    return TensorPlace(tuple(tensor.shape), spec.mesh, tuple(spec.placements))


def _mesh_ranks(mesh: DeviceMesh) -> MeshRanks:
    return MeshRanks(tuple(mesh.shape), tuple(mesh.mesh.flatten().tolist()))


def _compare(parameters: Sequence[MatrixParameter]) -> None:
    together: dict[tuple[int, ...], list[MatrixParameter]] = defaultdict(list)
    for parameter in parameters:
        if len(parameter.ranks) > 1:
            together[tuple(sorted(parameter.ranks))].append(parameter)
    for ranks, members in sorted(together.items(), key=lambda item: item[0]):
        described = {"parameters": [(f"{p.name} ({number})", p.describe()) for number, p in enumerate(members)]}
        found = compare_descriptions(described, Consensus(ranks, "owners of matrices"), lambda: "planning an optimizer")
        if found is not None:
            raise OptimizerParameterError(
                f"the optimizer's {found.text()}; give every rank the same parameters, in the same order and groups"
            )
