"""``PreconditionedOptimizer``: what Shampoo and SOAP have in common."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.agreement import Round
from vescale.comm import join_axes
from vescale.compat import is_alone, make_dtensor, make_spec, without_modes
from vescale.errors import ConsensusError, OptimizerError
from vescale.gradients import shares_of
from vescale.optim._matrix_exchange import OwnedMatrix
from vescale.optim._matrix_optimizer import MatrixOptimizer
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._step_gradients import check_no_capture
from vescale.placements import RaggedShard, contiguous_stride, ragged_axis

# States that a matrix's owner holds whole: DTensors of which one rank has all and the others have nothing.


def state_name(name: str, matrix: OwnedMatrix, num_matrices: int) -> str:
    """``name`` of a parameter with one matrix, ``name.3`` of the matrix 3 of several: the same on every mesh."""
    return name if num_matrices == 1 else f"{name}.{matrix.block}"


def owner_state(matrix: OwnedMatrix, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros of this shape, in the memory of the matrix's owner only. Checkpoints see a whole tensor, on whatever mesh."""
    mesh = matrix.place.mesh
    if mesh is None:
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    joined, placements = _placed(mesh, matrix)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    spec = make_spec(joined, placements, tuple(shape), contiguous_stride(shape), dtype)
    local_shape = tuple(shape)
    if ragged_axis(placements) is not None:  # local tensors of ragged placements are flat
        local_shape = (math.prod(shape) if matrix.is_owner(coordinate) else 0,)
    return make_dtensor(torch.zeros(local_shape, dtype=dtype, device=device), spec)


def _placed(mesh: DeviceMesh, matrix: OwnedMatrix) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """A mesh on which one axis, or several as one, tells the owner from all others."""
    axes = tuple(axis for axis in range(mesh.ndim) if axis not in matrix.repeated)
    if not axes:
        return mesh, (Replicate(),) * mesh.ndim
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + matrix.owner[axis]
    num_ranks = math.prod(mesh.size(axis) for axis in axes)
    one = RaggedShard((), tuple(int(rank == index) for rank in range(num_ranks)))
    if len(axes) == 1:
        return mesh, tuple(one if axis in axes else Replicate() for axis in range(mesh.ndim))
    return join_axes(mesh, axes), (*(Replicate(),) * (mesh.ndim - len(axes)), one)


def owned_values(state: torch.Tensor) -> torch.Tensor:
    """The values of :func:`owner_state`, on the owner, in their shape; shares their memory."""
    return local_tensor(state).view(state.shape)


# In which steps the costly part of each matrix's preconditioner is due, so that no step has much more than another.


def refresh_phases(costs: Sequence[int], frequencies: Sequence[int]) -> list[int]:
    """For each matrix a phase below its frequency: what is due every ``f`` steps is due in the steps ``phase + k f``.

    Costly matrices first, each to the phase with the least cost so far; the first of equal ones to the first phase.
    Depends on the matrices alone, and not on meshes and owners, because it decides the numbers. A single matrix has
    phase 0.
    """
    heaps: dict[int, list[tuple[int, int]]] = {}
    phases = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        frequency = frequencies[index]
        heap = heaps.setdefault(frequency, [(0, phase) for phase in range(frequency)])
        load, phases[index] = heap[0]
        heapq.heapreplace(heap, (load + costs[index], phases[index]))
    return phases


# What the stages of a pipeline have to refresh, so that all of them plan the schedule that one device has.

Entry = tuple[int, int, int]
"""Number of a group, place of a parameter in the whole model, number of a matrix in the parameter: the order in which one
device has matrices."""


def entries_of_all_stages(
    kind: str, group: dist.ProcessGroup, own: Mapping[Entry, tuple[int, int]]
) -> dict[Entry, tuple[int, int]]:
    """``own`` of all ranks of ``group``, which call this, in the order of one device; through the store.

    Raises ValueError if one of them does not come in time.
    """
    rounds = Round(dist.get_process_group_ranks(group), f"schedule {kind}")
    message = json.dumps([[*entry, *what] for entry, what in own.items()])
    with without_modes():
        try:
            messages = rounds.exchange(message.encode(), lambda: f"{kind} plans in which steps matrices are due")
        except ConsensusError as error:
            raise OptimizerError(
                f"{kind} plans the steps in which matrices are due over all stages of the model, but ranks "
                f"{list(error.ranks)} did not arrive within "
                f"{rounds.timeout}. All stages must create the optimizer, and add the same groups to it (without "
                "parameters where a stage has none: "
                '{"params": []}); or pass stagger=False, with which all matrices are due together'
            ) from None
    found = [row for each in messages for row in json.loads(each)]
    return dict(sorted({(g, place, block): (cost, frequency) for g, place, block, cost, frequency in found}.items()))


class PreconditionedOptimizer(MatrixOptimizer):
    """An optimizer whose owners get gradients, hold all states of their matrices, and send updates back.

    Parts of the work are due every ``precondition_frequency`` steps: each matrix has a phase (:func:`refresh_phases`),
    and owners are balanced within each phase.
    """

    def _check_group(self, group: dict[str, Any]) -> None:
        if not isinstance(group["lr"], torch.Tensor) and not group["lr"] >= 0:
            raise OptimizerError(f"lr={group['lr']!r}; pass a number >= 0")
        for name in ("weight_decay", "eps"):
            if not group[name] >= 0:
                raise OptimizerError(f"{name}={group[name]!r}; pass a number >= 0")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise OptimizerError(f"betas={group['betas']!r}; pass two numbers in [0, 1)")
        for name in ("precondition_frequency", "max_preconditioner_dim"):
            if type(group[name]) is not int or group[name] < 1:
                raise OptimizerError(f"{name}={group[name]!r}; pass a positive integer")

    def _check_capture(self) -> None:
        check_no_capture("which roots and bases are due", "call step() outside of the graph")

    def _announce(self, parameters: Sequence[MatrixParameter]) -> None:
        """Phases of matrices in models of which other ranks have the other stages: those of one device."""
        options = [self.defaults, *(group for group in self.param_groups if group["algorithm"] != "adamw")]
        has_phases = any(
            _frequency(each) > 1 for each in options
        )  # as on the other stages, whatever parameters they have
        if not has_phases or not dist.is_available() or not dist.is_initialized() or is_alone():
            return
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        groups = dict.fromkeys(share.group for share in shares_of(everything) if share is not None)
        shares = shares_of([parameter.tensor for parameter in parameters])
        for group in groups:
            own: dict[Entry, tuple[int, int]] = {}
            places: dict[Entry, tuple[int, int]] = {}
            for parameter, share in zip(parameters, shares):
                if share is None or share.group != group or parameter.grid is None:
                    continue
                number = next(i for i, known in enumerate(self.param_groups) if known is parameter.group)
                for block, box in enumerate(parameter.grid.boxes):
                    entry = (number, share.place, block)
                    cost = self._due_cost(parameter, *parameter.grid.matrix_shape(box.sizes))
                    own[entry] = (cost, _frequency(parameter.group))
                    places[entry] = (parameter.number, block)
            found = entries_of_all_stages(type(self).__name__, group, own)
            phases = refresh_phases(*([row[i] for row in found.values()] for i in (0, 1)))
            known = self.__dict__.setdefault("_phases", {})
            known.update({places[entry]: phase for entry, phase in zip(found, phases) if entry in places})

    def _kinds(self, matrices: Sequence[OwnedMatrix]) -> list[int]:
        known = self.__dict__.setdefault("_phases", {})
        new = [m for m in matrices if (m.parameter, m.block) not in known]  # others have been replaced
        owners = [self._parameter(matrix) for matrix in new]
        costs = [self._due_cost(parameter, matrix.rows, matrix.columns) for parameter, matrix in zip(owners, new)]
        phases = refresh_phases(costs, [_frequency(parameter.group) for parameter in owners])
        known.update({(m.parameter, m.block): phase for m, phase in zip(new, phases)})
        return [self._phase(matrix) for matrix in matrices]

    def _due_cost(self, parameter: MatrixParameter, rows: int, columns: int) -> int:
        """Of what is due every ``precondition_frequency`` steps, as floating-point operations."""
        largest = parameter.group["max_preconditioner_dim"]
        return sum(10 * side**3 for side in (rows, columns) if side <= largest)

    def _cost(self, parameter: MatrixParameter, rows: int, columns: int) -> int:
        sides = [side for side in (rows, columns) if side <= parameter.group["max_preconditioner_dim"]]
        always = sum(8 * rows * columns * side for side in sides)
        return (
            rows * columns + always + sum(10 * side**3 for side in sides) // parameter.group["precondition_frequency"]
        )

    def _phase(self, matrix: OwnedMatrix) -> int:
        return int(self.__dict__["_phases"][matrix.parameter, matrix.block])

    def _dtypes(self, parameter: MatrixParameter) -> tuple[torch.dtype, torch.dtype]:
        return parameter.tensor.dtype, _wide(parameter)

    def _make_states(self, parameter: MatrixParameter) -> dict[str, Any]:
        states: dict[str, torch.Tensor] = {"step": torch.tensor(0.0)}
        for matrix in parameter.matrices:
            for name, shape in self._state_shapes(parameter, matrix).items():
                key = state_name(name, matrix, len(parameter.matrices))
                states[key] = owner_state(matrix, shape, self._state_dtype(parameter, name), parameter.local.device)
        for name in () if parameter.grid is not None else self._element_states:
            states[name] = torch.zeros_like(parameter.tensor, dtype=_wide(parameter), requires_grad=False)
        return states

    def _has_states(self, parameter: MatrixParameter) -> bool:
        """Also those that options demand which were set after it was made, as OneCycleLR sets momenta."""
        states = self.state.get(parameter.tensor)
        if not states or not parameter.matrices:
            return bool(states)
        first = parameter.matrices[0]
        names = self._state_shapes(parameter, first)
        return all(state_name(name, first, len(parameter.matrices)) in states for name in names)

    def _expected_states(self, parameter: MatrixParameter) -> dict[str, tuple[int, ...]]:
        if parameter.grid is None:
            return super()._expected_states(parameter)
        number = len(parameter.matrices)
        return {
            state_name(name, matrix, number): shape
            for matrix in parameter.matrices
            for name, shape in self._state_shapes(parameter, matrix).items()
        }

    _planned = (*MatrixOptimizer._planned, "max_preconditioner_dim")

    _element_states: tuple[str, ...] = ()
    """Names of states, placed like the parameter, of parameters without matrices."""

    def _state_shapes(self, parameter: MatrixParameter, matrix: OwnedMatrix) -> dict[str, tuple[int, ...]]:
        """The states of a matrix, which its owner holds."""
        raise NotImplementedError

    def _state_dtype(self, parameter: MatrixParameter, name: str) -> torch.dtype:
        """Of a state of :meth:`_state_shapes`."""
        return _wide(parameter)

    def _begin(self, parameters: Sequence[MatrixParameter]) -> None:
        for parameter in parameters:
            self.state[parameter.tensor]["step"] += 1

    def _part(self, parameter: MatrixParameter, gradient: torch.Tensor) -> torch.Tensor:
        self._decay_before(parameter)
        return gradient

    def _decay_before(self, parameter: MatrixParameter) -> None:
        self.decay(parameter)

    def _compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> list[torch.Tensor]:
        updates = []
        for matrix, values in matrices:
            parameter = self._parameter(matrix)
            states = self.state[parameter.tensor]
            number = len(parameter.matrices)
            own = {
                name: owned_values(states[state_name(name, matrix, number)])
                for name in self._state_shapes(parameter, matrix)
            }
            gradient = values.view(matrix.rows, matrix.columns).to(_wide(parameter))
            update = self._precondition(matrix, parameter, gradient, own, int(states["step"]))
            updates.append(update.reshape(matrix.box.sizes))
        return updates

    def _precondition(
        self,
        matrix: OwnedMatrix,
        parameter: MatrixParameter,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        step: int,
    ) -> torch.Tensor:
        """The update of a matrix on its owner; ``states`` are changed in place. ``step`` counts from 1."""
        raise NotImplementedError

    def _local_states(self, parameter: MatrixParameter) -> dict[str, torch.Tensor]:
        return {name: local_tensor(self.state[parameter.tensor][name]) for name in self._element_states}

    def _subtract(self, parameter: MatrixParameter, update: torch.Tensor) -> None:
        lr, local = parameter.group["lr"], parameter.local
        if isinstance(lr, torch.Tensor):
            local.sub_((update * lr).to(local.dtype))
        else:
            local.add_(update, alpha=-lr)


def _frequency(group: dict[str, Any]) -> int:
    return int(group["precondition_frequency"]) if group["stagger"] else 1


def _wide(parameter: MatrixParameter) -> torch.dtype:
    return torch.promote_types(parameter.tensor.dtype, torch.float32)
