"""Newton-Schulz orthogonalization: the nearest (semi-)orthogonal matrix, roughly, by matrix products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale.errors import OptimizerOptionError

__all__ = ["STANDARD", "checked_coefficients", "newton_schulz", "newton_schulz_cost"]

STANDARD = (3.4445, -4.7750, 2.0315)
"""Coefficients of Keller Jordan's Muon: singular values end in about 0.7 to 1.2 after five steps."""

Coefficients = tuple[tuple[float, float, float], ...]


def checked_coefficients(given: object) -> Coefficients:
    """One triple, or one for each step (Polar Express), as triples; the last one is repeated.

    Raises ValueError for anything else.
    """
    rows = [given] if isinstance(given, Sequence) and given and not isinstance(given[0], Sequence) else given
    if not isinstance(rows, Sequence) or not rows or any(not isinstance(r, Sequence) or len(r) != 3 for r in rows):
        raise OptimizerOptionError(
            f"coefficients={given!r}; give three numbers (a, b, c), or a list of such triples, one for each step"
        )
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


def newton_schulz(
    matrix: torch.Tensor,
    coefficients: Coefficients = (STANDARD,),
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    norm_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """The matrix with its singular values brought near 1. Reads ``matrix``, and returns a tensor of ``dtype``.

    X starts as the matrix divided by its Frobenius norm; a step is ``X <- a X + (b A + c A^2) X`` with ``A = X X^T``,
    on the shorter side. With ``norm_dtype`` None the norm is taken, and the division done, after the cast to ``dtype``,
    which is what ``torch.optim.Muon`` does, bit for bit.

    Args:
        matrix: [m, n], or [b, m, n] for b matrices at once (other kernels, which round otherwise).
        coefficients: (a, b, c) of each step; the last triple is repeated.
        eps: smallest norm to divide by, so that a matrix of zeros stays one.
    """
    many = matrix.ndim == 3
    if norm_dtype is None:
        x = matrix.to(dtype, copy=True)
    else:
        wide = matrix.to(norm_dtype, copy=True)
        x = wide.div_(_norm(wide).clamp(min=eps)).to(dtype)
    is_tall = matrix.size(-2) > matrix.size(-1)
    if is_tall:
        x = x.mT
    if norm_dtype is None:
        x.div_(_norm(x).clamp(min=eps))
    product = torch.baddbmm if many else torch.addmm
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        gram = x @ x.mT
        update = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, update, x, beta=a)
    return x.mT if is_tall else x


def _norm(matrix: torch.Tensor) -> torch.Tensor:
    """The Frobenius norm of each matrix."""
    return matrix.norm() if matrix.ndim == 2 else matrix.norm(dim=(-2, -1), keepdim=True)


def newton_schulz_cost(rows: int, columns: int, steps: int = 5) -> int:
    """Floating-point operations: ``k s^2 (4 l + 2 s)``, s the shorter and l the longer side."""
    short, long = sorted((rows, columns))
    return max(1, steps) * short * short * (4 * long + 2 * short)
