"""``Muon``: momentum whose matrices are orthogonalized whole, each by one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from vescale.comm import DEFAULT_BUCKET_BYTES
from vescale.errors import OptimizerOptionError
from vescale.optim._matrix_blocks import MatrixGrid, matrix_grid
from vescale.optim._matrix_optimizer import MatrixOptimizer
from vescale.optim._matrix_parameters import MatrixParameter, local_tensor
from vescale.optim._matrix_schedule import OwnedMatrix
from vescale.optim._named_dtypes import dtype_name, named_dtype
from vescale.optim._newton_schulz import STANDARD, checked_coefficients, newton_schulz, newton_schulz_cost

__all__ = ["Muon"]

_ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(MatrixOptimizer):
    """Muon for matrices, AdamW for the rest, on parameters in any placement.

    For each matrix G (m x n) of the gradient: ``B = mu B + (1 - mu) G``; ``U = (1 - mu) G + mu B`` (without Nesterov
    B); ``W = (1 - lr wd) W - lr s(m, n) O`` with O, ``U`` orthogonalized by Newton-Schulz. These are the equations and
    the numbers of ``torch.optim.Muon``; with ``norm_dtype=None`` also its bits.

    A matrix is computed whole by one rank, the owner; the others compute nothing of it. Parameters and states have the
    bits of one device for equal gradients with ``batch=1``, on any mesh.

    ================  ==============================================================  =============================
    of a parameter    is                                                              communicated in a step
    ================  ==============================================================  =============================
    value             as it was given: any placement                                  its update, once to each rank
                                                                                      that holds it, in ``ns_dtype``
    gradient          placed like it; others are brought there                        ``U``, once to the owner
    momentum_buffer   placed like it, with its dtype                                  nothing
    ================  ==============================================================  =============================

    What the owner holds itself does not travel: nothing does where each matrix has all its elements on one rank
    (:func:`~vescale.optim.muon_layout`). ``U`` travels with the parameter's dtype, with ``norm_dtype=None`` in
    ``ns_dtype``.

    Args:
        params: parameters, named or not, or groups; :func:`~vescale.optim.muon_groups` makes them by name. Options of a
            group: ``algorithm``: ``"muon"`` (default) or ``"adamw"``, whose options are ``lr=1e-3, betas=(0.9, 0.999),
            eps=1e-8, weight_decay=1e-2, capturable=False`` unless the group has its own: they are not Muon's.
            ``capturable``: AdamW's step number, and an ``lr`` that is a tensor, stay on the device (CUDA graphs).
            ``blocks``: which parts of each matrix are matrices of their own, for example fused projections: ``n`` equal
            blocks of rows, a list of row counts, or ``("dim", 1, n or list)`` for columns. A parameter of 3 dims
            ``[E, m, n]`` is E matrices, each cut by ``blocks``.
        lr, weight_decay: decay is by ``lr`` itself, not adjusted. A tensor is never read by the host for matrices.
        momentum, nesterov: mu, and which U.
        ns_steps, coefficients, eps: see :func:`~vescale.optim._newton_schulz.newton_schulz`; one triple or one a step.
        ns_dtype: of the iterations.
        norm_dtype: in which the norm is taken, before the cast to ``ns_dtype``; None: after the cast.
        adjust_lr: ``s(m, n)`` of each block: ``"original"`` sqrt(max(1, m/n)), ``"match_rms_adamw"`` 0.2 sqrt(max(m,
            n)), ``"spectral"`` sqrt(m/n).
        batch: up to so many matrices of one shape are iterated together on their owner. More than 1 uses other kernels,
            which round otherwise: results then depend on the mesh, in bfloat16 by about 1e-2 of an update.
        orthogonalize: ``f(U) -> O`` in place of Newton-Schulz, for variants; [m, n], or [b, m, n] with ``batch``. The
            result travels with the parameter's dtype.
        skip_nonfinite: leave everything as it is, on all ranks, in a step in which any gradient has inf or nan: those
            of the meshes of which the parameters' meshes are slices, and of all stages of a pipeline.
        split_replicas: along axes that replicate a parameter, one of the replicas computes, and the others get a copy.
            False: each computes for itself, and nothing is copied.
        compare_gradients: compare in each step which gradients ranks have, so that one that is missing on some ranks
            counts as zeros there. One small all-reduce. None: where something travels anyway; elsewhere gradients that
            the engines of this package make are alike.
        bucket_bytes: an owner receives about so many in one all-to-all.

    Raises:
        ValueError: options without meaning, parameters that are no matrices, or that differ between ranks.
    """

    algorithm = "muon"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        *,
        coefficients: Any = STANDARD,
        eps: float = 1e-7,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        norm_dtype: torch.dtype | None = torch.float32,
        adjust_lr: str = "original",
        batch: int = 1,
        orthogonalize: Callable[[torch.Tensor], torch.Tensor] | None = None,
        skip_nonfinite: bool = False,
        split_replicas: bool = True,
        compare_gradients: bool | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if orthogonalize is not None and not callable(orthogonalize):
            raise OptimizerOptionError(f"orthogonalize={orthogonalize!r}; give a function of a matrix, or None")
        self._orthogonalize = orthogonalize
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "coefficients": coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "norm_dtype": norm_dtype,
            "adjust_lr": adjust_lr,
            "batch": batch,
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
        lr, wanted = group["lr"], "a number >= 0"
        if isinstance(lr, torch.Tensor):
            if lr.numel() != 1:
                raise OptimizerOptionError(f"lr has {lr.numel()} elements; give one number")
        elif not lr >= 0:
            raise OptimizerOptionError(f"lr={lr!r}; give {wanted}")
        for name in ("weight_decay", "momentum", "eps"):
            if not group[name] >= 0:
                raise OptimizerOptionError(f"{name}={group[name]!r}; give {wanted}")
        if group["adjust_lr"] not in _ADJUSTMENTS:
            raise OptimizerOptionError(f"adjust_lr={group['adjust_lr']!r}; give one of {sorted(_ADJUSTMENTS)}")
        for name, least in (("ns_steps", 0), ("batch", 1)):
            if not isinstance(group[name], int) or not least <= group[name]:
                raise OptimizerOptionError(f"{name}={group[name]!r}; give an integer >= {least}")
        for name in ("ns_dtype", "norm_dtype"):
            if group[name] is not None or name == "ns_dtype":
                group[name] = dtype_name(group[name], name)
        group["coefficients"] = checked_coefficients(group["coefficients"])

    def _grid(self, parameter: MatrixParameter) -> MatrixGrid | None:
        if parameter.group["algorithm"] == "adamw":
            return None
        return matrix_grid(parameter.place.shape, parameter.group["blocks"], parameter.name)

    def _cost(self, parameter: MatrixParameter, rows: int, columns: int) -> int:
        return newton_schulz_cost(rows, columns, parameter.group["ns_steps"])

    def _dtypes(self, parameter: MatrixParameter) -> tuple[torch.dtype, torch.dtype]:
        group, own = parameter.group, parameter.tensor.dtype
        if self._orthogonalize is not None:
            return own, own
        iterated = named_dtype(group["ns_dtype"])
        return (own if group["norm_dtype"] is not None else iterated), iterated

    _planned = (*MatrixOptimizer._planned, "ns_dtype", "norm_dtype")

    def _expected_states(self, parameter: MatrixParameter) -> dict[str, tuple[int, ...]]:
        if parameter.group["algorithm"] == "adamw":
            return super()._expected_states(parameter)
        return {"momentum_buffer": parameter.place.shape}

    def _make_states(self, parameter: MatrixParameter) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(parameter.tensor, requires_grad=False)}

    def _part(self, parameter: MatrixParameter, gradient: torch.Tensor) -> torch.Tensor:
        momentum = parameter.group["momentum"]
        buffer = local_tensor(self.state[parameter.tensor]["momentum_buffer"])
        buffer.lerp_(gradient.to(buffer.dtype), 1 - momentum)
        self.decay(parameter)
        return gradient.to(buffer.dtype).lerp(buffer, momentum) if parameter.group["nesterov"] else buffer

    def _compute(self, matrices: Sequence[tuple[OwnedMatrix, torch.Tensor]]) -> list[torch.Tensor]:
        updates: dict[OwnedMatrix, torch.Tensor] = {}
        together: dict[Any, list[tuple[OwnedMatrix, torch.Tensor]]] = {}
        for matrix, values in matrices:
            group = self._parameter(matrix).group
            if group["batch"] == 1:
                updates[matrix] = self._orthogonal(values.view(matrix.rows, matrix.columns), group)
            else:
                together.setdefault((id(group), matrix.rows, matrix.columns), []).append((matrix, values))
        for alike in together.values():
            group = self._parameter(alike[0][0]).group
            for start in range(0, len(alike), group["batch"]):
                chunk = alike[start : start + group["batch"]]
                stacked = torch.stack([values.view(matrix.rows, matrix.columns) for matrix, values in chunk])
                updates.update(zip((matrix for matrix, _ in chunk), self._orthogonal(stacked, group)))
        return [updates[matrix].reshape(matrix.box.sizes) for matrix, _ in matrices]

    def _orthogonal(self, values: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        if self._orthogonalize is None:
            norm_dtype = None if group["norm_dtype"] is None else named_dtype(group["norm_dtype"])
            return newton_schulz(
                values,
                group["coefficients"],
                group["ns_steps"],
                group["eps"],
                named_dtype(group["ns_dtype"]),
                norm_dtype,
            )
        found = self._orthogonalize(values)
        if found.shape != values.shape:
            raise OptimizerOptionError(
                f"orthogonalize was given {tuple(values.shape)} and returned {tuple(found.shape)}; return the shape "
                "that was given"
            )
        return found.to(values.dtype)

    def _rate(self, matrix: OwnedMatrix) -> Any:
        group = self._parameter(matrix).group
        return group["lr"] * _ADJUSTMENTS[group["adjust_lr"]](matrix.rows, matrix.columns)
