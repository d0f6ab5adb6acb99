"""Shampoo and SOAP on one plain matrix, a page each, as their papers write them; float64 for the roots."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["shampoo_steps", "soap_steps"]


def power(matrix: torch.Tensor, exponent: float, eps: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(matrix.double())
    return (vectors @ torch.diag((values.clamp(min=0) + eps) ** exponent) @ vectors.T).to(matrix.dtype)


def shampoo_steps(
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    *,
    lr: float,
    b1: float = 0.0,
    b2: float = 0.999,
    eps: float = 1e-12,
    wd: float = 0.0,
    frequency: int = 1,
    start: int = 1,
    grafting: Any = "adam",
) -> torch.Tensor:
    """arXiv 1802.09568, with an exponential average, and the norm of another step (grafting)."""
    m, n = weight.shape
    left, right = torch.zeros(m, m), torch.zeros(n, n)
    average, square = torch.zeros(m, n), torch.zeros(m, n)
    left_root, right_root = torch.eye(m), torch.eye(n)
    for t, g in enumerate(gradients, 1):
        left = b2 * left + (1 - b2) * g @ g.T
        right = b2 * right + (1 - b2) * g.T @ g
        average = b1 * average + (1 - b1) * g
        square = b2 * square + (1 - b2) * g * g
        filtered = average / (1 - b1**t)
        adam = filtered / ((square / (1 - b2**t)).sqrt() + 1e-8)
        grafted = adam if grafting == "adam" else filtered
        step = grafted
        if t >= start:
            if (t - start) % frequency == 0:
                left_root, right_root = power(left, -0.25, eps), power(right, -0.25, eps)
            step = left_root @ filtered @ right_root
            if grafting is not None:
                step = step * grafted.norm() / step.norm()
        weight = (1 - lr * wd) * weight - lr * step
    return weight


def soap_steps(
    weight: torch.Tensor,
    gradients: list[torch.Tensor],
    *,
    lr: float,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    wd: float = 0.01,
    frequency: int = 10,
    largest: int = 10000,
) -> torch.Tensor:
    """arXiv 2409.11321, algorithm 3, in the form of its published code: m stays in the basis, v is permuted."""
    m, n = weight.shape
    left, right = (1 - b2) * gradients[0] @ gradients[0].T, (1 - b2) * gradients[0].T @ gradients[0]
    ql = torch.linalg.eigh(left)[1].flip(1) if m <= largest else torch.eye(m)
    qr = torch.linalg.eigh(right)[1].flip(1) if n <= largest else torch.eye(n)
    average, square = torch.zeros(m, n), torch.zeros(m, n)
    for t, g in enumerate(gradients[1:], 1):
        rotated = ql.T @ g @ qr
        average = b1 * average + (1 - b1) * rotated
        square = b2 * square + (1 - b2) * rotated**2
        corrected = (average / (1 - b1**t)) / (square.sqrt() + eps) * (1 - b2**t) ** 0.5
        weight = (1 - lr * wd) * weight - lr * ql @ corrected @ qr.T
        left = b2 * left + (1 - b2) * g @ g.T
        right = b2 * right + (1 - b2) * g.T @ g
        if t % frequency == 0:
            back = ql @ average @ qr.T
            if m <= largest:
                order = torch.diag(ql.T @ left @ ql).argsort(descending=True)
                square, ql = square[order], torch.linalg.qr(left @ ql[:, order])[0]
            if n <= largest:
                order = torch.diag(qr.T @ right @ qr).argsort(descending=True)
                square, qr = square[:, order], torch.linalg.qr(right @ qr[:, order])[0]
            average = ql.T @ back @ qr
    return weight
