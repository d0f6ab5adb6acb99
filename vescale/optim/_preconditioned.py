"""``Shampoo`` and ``SOAP``, and ``PreconditionedOptimizer``, what they have in common."""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.agreement import Round
from vescale.comm import DEFAULT_BUCKET_BYTES, join_axes
from vescale.compat import is_alone, make_dtensor, make_spec, without_modes
from vescale.errors import ConsensusError, OptimizerError
from vescale.gradients import shares_of
from vescale.optim._matrix_blocks import MatrixGrid, tile_grid
from vescale.optim._matrix_exchange import OwnedMatrix
from vescale.optim._matrix_optimizer import MatrixOptimizer
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._report import dtype_name, named_dtype
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


# ``Shampoo``: Kronecker-factored preconditioning of tiles, each by one rank, with the size of a grafted step.


_GRAFT_EPS = 1e-8  # of Adam's step


class Shampoo(PreconditionedOptimizer):
    """Shampoo on parameters in any placement; AdamW for groups with ``algorithm="adamw"``.

    A matrix is split into tiles of at most ``max_preconditioner_dim``. For each tile G, ``L = b2 L + (1 - b2) G G^T``
    and ``R = b2 R + (1 - b2) G^T G``; the direction is ``(L + eps)^(-1/4) G (R + eps)^(-1/4)``, scaled to the norm of
    the grafted step. Decay is decoupled, as in AdamW. L and R are not corrected for their start at zero, which the
    scaling would undo. Each tile is computed by one rank, which alone holds its states; results have the bits of one
    device on any mesh.

    In a step the gradient of each tile travels to the owner once, in the parameter's dtype, and the update once to each
    rank that holds it, in float32 at least.

    A vector has one factor, with the exponent -1/2. A parameter of 3 dims is a stack of matrices; of more dims, one
    matrix whose columns are the dims behind the first. A scalar takes the grafted step.

    Args:
        params: parameters, named or not, or groups, as :class:`~vescale.optim.Muon` takes them, with
            ``algorithm="shampoo"`` (default) or ``"adamw"``, and ``blocks``.
        betas: of the average of gradients (0: none, else corrected for its start at zero) and of L, R and Adam's
        square. eps: added to the eigenvalues of L and R.
        precondition_frequency: the number of steps after which roots are recomputed.
        start_preconditioning_step: the grafted step is taken before; None: ``precondition_frequency``.
        grafting: the method whose step determines the size: ``"adam"``, without momentum (eps 1e-8); ``"sgd"``, the
            gradient; None: no scaling (before the first root, the gradient).
        stagger: the roots of different tiles are due in different steps of each ``precondition_frequency``; a tile's
            first root may then be up to so many steps later. The schedule depends on the tiles alone. False: all in the
            same step.
        skip_nonfinite, split_replicas, compare_gradients, bucket_bytes: as in :class:`~vescale.optim.Muon`.
        lr: learning rate.
        weight_decay: of the parameters, decoupled from the gradient.

    Where L or R is not finite, so is the direction: no rank raises while others wait for it.

    Raises ValueError for options without meaning, or parameters that differ between ranks.
    """

    algorithm = "shampoo"
    _element_states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.0, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        precondition_frequency: int = 1,
        start_preconditioning_step: int | None = None,
        max_preconditioner_dim: int = 1024,
        grafting: str | None = "adam",
        stagger: bool = True,
        skip_nonfinite: bool = False,
        split_replicas: bool = True,
        compare_gradients: bool | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        super().__init__(params, dict(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if group["grafting"] not in ("adam", "sgd", None):
            raise OptimizerError(f'grafting={group["grafting"]!r}; pass "adam", "sgd" or None')
        start = group["start_preconditioning_step"]
        if start is not None and (type(start) is not int or start < 1):
            raise OptimizerError(f"start_preconditioning_step={start!r}; pass a positive integer, or None")

    def _grid(self, parameter: MatrixParameter) -> MatrixGrid | None:
        group = parameter.group
        if group["algorithm"] == "adamw" or not parameter.place.shape:
            return None
        return tile_grid(parameter.place.shape, group["blocks"], group["max_preconditioner_dim"], parameter.name)

    def _state_shapes(self, parameter: MatrixParameter, matrix: OwnedMatrix) -> dict[str, tuple[int, ...]]:
        rows, columns = matrix.rows, matrix.columns
        shapes: dict[str, tuple[int, ...]] = {"row_factor": (rows, rows), "row_root": (rows, rows)}
        if len(parameter.place.shape) > 1:
            shapes |= {"column_factor": (columns, columns), "column_root": (columns, columns)}
        if parameter.group["grafting"] == "adam":
            shapes["exp_avg_sq"] = (rows, columns)
        if parameter.group["betas"][0]:
            shapes["exp_avg"] = (rows, columns)
        return shapes

    def _precondition(
        self,
        matrix: OwnedMatrix,
        parameter: MatrixParameter,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        step: int,
    ) -> torch.Tensor:
        group = parameter.group
        decay = group["betas"][1]
        _average_factors(states, gradient, decay)
        filtered, grafted = self._grafted(group, gradient, states, step)
        frequency = group["precondition_frequency"]
        first = (group["start_preconditioning_step"] or frequency) + self._phase(matrix)
        if step < first:
            return grafted
        power = -1 / 4 if "column_factor" in states else -1 / 2
        if (step - first) % frequency == 0:
            for side in ("row", "column") if "column_factor" in states else ("row",):
                states[f"{side}_root"].copy_(inverse_root(states[f"{side}_factor"], power, group["eps"]))
        direction = states["row_root"] @ filtered
        if "column_root" in states:
            direction = direction @ states["column_root"]
        norm = direction.norm()
        if group["grafting"] is not None:
            direction.mul_(grafted.norm() / norm.clamp(min=torch.finfo(direction.dtype).tiny))
        # No root has been due since the parameter, or the checkpoint, came from other groups, with another schedule.
        return torch.where(norm == 0, grafted, direction)

    def _grafted(
        self, group: dict[str, Any], gradient: torch.Tensor, states: dict[str, torch.Tensor], step: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the averaged gradient, the step whose size is taken)"""
        beta, decay = group["betas"]
        filtered = gradient
        if beta:
            states["exp_avg"].mul_(beta).add_(gradient, alpha=1 - beta)
            filtered = states["exp_avg"] / (1 - beta**step)
        if group["grafting"] != "adam":
            return filtered, filtered
        square = states["exp_avg_sq"].mul_(decay).addcmul_(gradient, gradient, value=1 - decay)
        return filtered, filtered / ((square / (1 - decay**step)).sqrt_().add_(_GRAFT_EPS))

    def _update_elements(self, parameter: MatrixParameter, gradient: torch.Tensor) -> None:
        states, step = self._local_states(parameter), int(self.state[parameter.tensor]["step"])
        self.decay(parameter)
        self._subtract(parameter, self._grafted(parameter.group, gradient.to(states["exp_avg"].dtype), states, step)[1])


def inverse_root(factor: torch.Tensor, power: float, eps: float) -> torch.Tensor:
    """``(factor + eps)^power`` of a symmetric positive semi-definite matrix, by its eigenvalues, in float64. Those below the
    rounding of the largest one, ``size * machine epsilon`` of the factor's dtype, are noise, also below zero, and count as
    that much: a negative power would make them the largest. A matrix that is not finite gives nan."""
    if not bool(torch.isfinite(factor).all()):
        return torch.full_like(factor, torch.nan)
    values, vectors = torch.linalg.eigh(factor.double())
    rounding = len(factor) * torch.finfo(factor.dtype).eps
    values = values.clamp(min=values[-1].clamp(min=0) * rounding)
    return ((vectors * values.add(eps).pow(power)) @ vectors.T).to(factor.dtype)


# ``SOAP``: Adam in the eigenbasis of Shampoo's factors, each matrix by one rank.


_WHOLE = 2**62  # matrices are not tiled
_RIDGE = 1e-6  # of a factor's mean eigenvalue; far above float64 rounding, far below what a factor tells


class SOAP(PreconditionedOptimizer):
    """SOAP on parameters in any placement; AdamW for groups with ``algorithm="adamw"``.

    For a matrix G with bases Q_L, Q_R: ``G' = Q_L^T G Q_R``, Adam on G' gives m and v, and
    ``W <- (1 - lr wd) W - lr Q_L (m / (sqrt(v) + eps)) Q_R^T``, with Adam's correction of both averages. Then
    ``L = b2 L + (1 - b2) G G^T``, R alike. The first step only makes the bases, by eigenvectors of L and R; it changes
    no parameter. Every ``precondition_frequency`` steps they are refreshed: v is permuted to the order of the diagonal
    of ``Q^T L Q``, and QR of ``L Q`` gives the new Q, into which m is rotated. Each matrix is computed by one rank,
    which alone holds its states; results have the bits of one device on any mesh.

    L and R are averaged, and decomposed, in ``factor_dtype``. Where they have no full rank (fewer tokens than sides), any
    basis of their null space is one of eigenvectors, and rounding would choose: the one nearest to fixed vectors is taken,
    and QR is that of ``(L + d) Q``, with d of 1e-6 of L's mean eigenvalue, below which eigenvalues count as zero, R alike.

    In a step the gradient of each matrix travels to the owner once, in the parameter's dtype, and the update once to
    each rank that holds it, in float32 at least. Vectors, scalars, and sides longer than ``max_preconditioner_dim``
    have no basis; Adam on vectors and scalars runs on each rank's part. Parameters of 3 dims and more are seen as by
    :class:`~vescale.optim.Shampoo`.

    Args:
        params: parameters, named or not, or groups, as :class:`~vescale.optim.Muon` takes them, with
            ``algorithm="soap"`` (default) or ``"adamw"``, and ``blocks``.
        betas: of m, and of v, L and R.
        weight_decay: decoupled, as in AdamW.
        stagger: refreshes of different matrices are due in different steps. The schedule depends on the matrices alone;
            with a single matrix it is that of the paper. False: all in the same step.
        factor_dtype: of L and R, torch.float64 or torch.float32. float32 halves their memory; with real gradients, whose
            last bits differ between meshes, losses then differ by 20 to 700 times as much (docs/optimizers-matrix.md).
        skip_nonfinite, split_replicas, compare_gradients, bucket_bytes: as in :class:`~vescale.optim.Muon`.

    Raises ValueError for options without meaning, or parameters that differ between ranks.
    """

    algorithm = "soap"
    _element_states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        precondition_frequency: int = 10,
        max_preconditioner_dim: int = 10000,
        stagger: bool = True,
        factor_dtype: torch.dtype = torch.float64,
        skip_nonfinite: bool = False,
        split_replicas: bool = True,
        compare_gradients: bool | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        super().__init__(params, dict(locals()))

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        group["factor_dtype"] = dtype_name(group["factor_dtype"], "factor_dtype")
        if group["factor_dtype"] not in ("float32", "float64"):
            raise OptimizerError(f"factor_dtype={group['factor_dtype']!r}; pass torch.float64 or torch.float32")

    def _grid(self, parameter: MatrixParameter) -> MatrixGrid | None:
        shape = parameter.place.shape
        if parameter.group["algorithm"] == "adamw" or len(shape) < 2:
            return None
        return tile_grid(shape, parameter.group["blocks"], _WHOLE, parameter.name)

    def _state_shapes(self, parameter: MatrixParameter, matrix: OwnedMatrix) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            "exp_avg": (matrix.rows, matrix.columns),
            "exp_avg_sq": (matrix.rows, matrix.columns),
        }
        for side, size in (("row", matrix.rows), ("column", matrix.columns)):
            if size <= parameter.group["max_preconditioner_dim"]:
                shapes |= {f"{side}_factor": (size, size), f"{side}_basis": (size, size)}
        return shapes

    def _state_dtype(self, parameter: MatrixParameter, name: str) -> torch.dtype:
        wide = super()._state_dtype(parameter, name)
        return (
            torch.promote_types(wide, named_dtype(parameter.group["factor_dtype"]))
            if name.endswith("_factor")
            else wide
        )

    def _decay_before(self, parameter: MatrixParameter) -> None:
        if int(self.state[parameter.tensor]["step"]) > 1:
            self.decay(parameter)

    def _precondition(
        self,
        matrix: OwnedMatrix,
        parameter: MatrixParameter,
        gradient: torch.Tensor,
        states: dict[str, torch.Tensor],
        step: int,
    ) -> torch.Tensor:
        group = parameter.group
        if step == 1:
            _average_factors(states, gradient, group["betas"][1])
            for side in ("row", "column"):
                if f"{side}_basis" in states:
                    states[f"{side}_basis"].copy_(eigenbasis(states[f"{side}_factor"]))
            return torch.zeros_like(gradient)
        update = _rotated_back(_adam(group, _rotated(gradient, states), states, step - 1), states)
        _average_factors(states, gradient, group["betas"][1])
        frequency = group["precondition_frequency"]
        if (step - 1) % frequency == self._phase(matrix) % frequency:
            _refresh(states)
        return update

    def _update_elements(self, parameter: MatrixParameter, gradient: torch.Tensor) -> None:
        step = int(self.state[parameter.tensor]["step"])
        if step > 1:
            states = self._local_states(parameter)
            self.decay(parameter)
            self._subtract(parameter, _adam(parameter.group, gradient.to(states["exp_avg"].dtype), states, step - 1))


def _adam(group: dict[str, Any], gradient: torch.Tensor, states: dict[str, torch.Tensor], step: int) -> torch.Tensor:
    beta1, beta2 = group["betas"]
    states["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
    states["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    correction = (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    return states["exp_avg"] / states["exp_avg_sq"].sqrt().add_(group["eps"]) * correction


def _average_factors(states: dict[str, torch.Tensor], gradient: torch.Tensor, beta: float) -> None:
    for side, rows in (("row", gradient), ("column", gradient.T)):
        if f"{side}_factor" in states:
            factor = states[f"{side}_factor"]
            rows = rows.to(factor.dtype)
            factor.mul_(beta).add_(rows @ rows.T, alpha=1 - beta)


def _rotated(values: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
    if "row_basis" in states:
        values = states["row_basis"].T @ values
    return values @ states["column_basis"] if "column_basis" in states else values


def _rotated_back(values: torch.Tensor, states: dict[str, torch.Tensor]) -> torch.Tensor:
    if "row_basis" in states:
        values = states["row_basis"] @ values
    return values @ states["column_basis"].T if "column_basis" in states else values


def _refresh(states: dict[str, torch.Tensor]) -> None:
    """One step of power iteration and QR for each basis; m keeps its meaning, and v its order of eigenvalues."""
    average = _rotated_back(states["exp_avg"], states)
    for dim, side in enumerate(("row", "column")):
        if f"{side}_basis" in states:
            factor, basis = states[f"{side}_factor"], states[f"{side}_basis"]
            before = basis.to(factor.dtype)
            product = factor @ before
            order = (before * product).sum(0).argsort(descending=True, stable=True)
            states["exp_avg_sq"].copy_(states["exp_avg_sq"].index_select(dim, order))
            if bool(torch.isfinite(factor).all()):
                product += before * _ridge(factor)  # where the factor is zero, directions stay
                basis.copy_(torch.linalg.qr(product[:, order])[0])
            else:
                basis.fill_(torch.nan)
    states["exp_avg"].copy_(_rotated(average, states))


def _ridge(factor: torch.Tensor) -> torch.Tensor:
    return factor.diagonal().mean() * _RIDGE


def eigenbasis(factor: torch.Tensor) -> torch.Tensor:
    """Eigenvectors, those of the largest eigenvalues first. In a null space, the orthonormal basis that is nearest to fixed
    vectors: any other one would be a matter of rounding. A matrix that is not finite gives nan."""
    if not bool(torch.isfinite(factor).all()):
        return torch.full_like(factor, torch.nan)
    try:
        values, vectors = torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        values, vectors = (found.to(factor.dtype) for found in torch.linalg.eigh(factor.double()))
    rounding = values[-1] * len(factor) * torch.finfo(factor.dtype).eps
    missing = int((values <= torch.maximum(_ridge(factor), rounding)).sum())
    if missing:
        null = vectors[:, :missing]
        left, _, right = torch.linalg.svd(null.T @ _fixed_vectors(len(factor), missing).to(null))
        vectors[:, :missing] = null @ (left @ right)
    return vectors.flip(1)


def _fixed_vectors(size: int, count: int) -> torch.Tensor:
    """Orthonormal columns in no special position: no null space that occurs is orthogonal to one of them."""
    generator = torch.Generator().manual_seed(size)
    return torch.linalg.qr(torch.randn(size, count, generator=generator, dtype=torch.float64))[0]
