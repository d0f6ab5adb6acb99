"""``PreconditionedOptimizer``: what Shampoo and SOAP have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.compat import is_alone
from vescale.errors import OptimizerOptionError
from vescale.gradients import shares_of
from vescale.optim._graph_capture import check_no_capture
from vescale.optim._matrix_optimizer import MatrixOptimizer
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._matrix_schedule import OwnedMatrix
from vescale.optim._owner_states import owned_values, owner_state, state_name
from vescale.optim._refresh_phases import refresh_phases
from vescale.optim._stage_schedule import Entry, entries_of_all_stages

__all__ = ["PreconditionedOptimizer"]


class PreconditionedOptimizer(MatrixOptimizer):
    """An optimizer whose owners get gradients, hold all states of their matrices, and send updates back.

    Parts of the work are due every ``precondition_frequency`` steps: each matrix has a phase (:func:`refresh_phases`),
    and owners are balanced within each phase.
    """

    def _check_group(self, group: dict[str, Any]) -> None:
        if not isinstance(group["lr"], torch.Tensor) and not group["lr"] >= 0:
            raise OptimizerOptionError(f"lr={group['lr']!r}; give a number >= 0")
        for name in ("weight_decay", "eps"):
            if not group[name] >= 0:
                raise OptimizerOptionError(f"{name}={group[name]!r}; give a number >= 0")
        if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
            raise OptimizerOptionError(f"betas={group['betas']!r}; give two numbers, each at least 0 and less than 1")
        for name in ("precondition_frequency", "max_preconditioner_dim"):
            if type(group[name]) is not int or group[name] < 1:
                raise OptimizerOptionError(f"{name}={group[name]!r}; give a positive integer")

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
