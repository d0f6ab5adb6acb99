"""``SOAP``: Adam in the eigenbasis of Shampoo's factors, each matrix by one rank."""

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
from vescale.optim._report import dtype_name, named_dtype

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "stagger": stagger,
            "factor_dtype": factor_dtype,
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
