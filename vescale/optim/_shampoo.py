"""``Shampoo``: Kronecker-factored preconditioning of tiles, each by one rank, with the size of a grafted step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from vescale.comm import DEFAULT_BUCKET_BYTES
from vescale.errors import OptimizerError
from vescale.optim._matrix_blocks import MatrixGrid, tile_grid
from vescale.optim._matrix_exchange import OwnedMatrix
from vescale.optim._matrix_parameters import MatrixParameter
from vescale.optim._preconditioned import PreconditionedOptimizer

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "start_preconditioning_step": start_preconditioning_step,
            "max_preconditioner_dim": max_preconditioner_dim,
            "grafting": grafting,
            "stagger": stagger,
            "blocks": None,
        }
        super().__init__(
            params,
            defaults,
            skip_nonfinite=skip_nonfinite,
            split_replicas=split_replicas,
            compare_gradients=compare_gradients,
            bucket_bytes=bucket_bytes,
        )

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
        states["row_factor"].mul_(decay).add_(gradient @ gradient.T, alpha=1 - decay)
        if "column_factor" in states:
            states["column_factor"].mul_(decay).add_(gradient.T @ gradient, alpha=1 - decay)
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
