"""Values for integers and booleans that would follow from floating-point numbers which are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Routing", "unknown_scalar", "unknown_values"]

_aten = torch.ops.aten
_CHOICES = 1 << 24  # elements of a table of random numbers
_TUNED, _ROUNDS = 4096, 10  # rows, and rounds, in which weights are found
_TRUE = ("eq", "le", "lt", "ne", "isfinite", "logical_or", "equal", "is_same_size")


@dataclass
class Routing:
    """How tokens choose experts.

    Attributes:
        factor: how many times as many tokens as the mean the experts of this rank get.
        histogram: relative numbers of tokens of all experts, in place of ``factor``.
        share: (index, count): this rank has the index-th of ``count`` equal parts of the experts.
        seed: of the choices, which are random.
    """

    factor: float = 1.0
    histogram: Sequence[float] | None = None
    share: tuple[int, int] = (0, 1)
    seed: int = 0
    _chosen: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def choose(self, num_rows: int, num_experts: int, num_choices: int) -> torch.Tensor:
        """Different experts for each row, of shape (rows, choices)."""
        key = num_rows, num_experts, num_choices
        if key not in self._chosen:
            self._chosen.clear()
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, num_rows: int, num_experts: int, num_choices: int) -> torch.Tensor:
        weights = self._weights(num_experts)
        if num_rows * num_experts <= _CHOICES:
            generator = torch.Generator().manual_seed(self.seed)
            keys = torch.rand(num_rows, num_experts, generator=generator).log_()
            if num_rows and num_choices < num_experts:
                weights = _reaching(weights, keys[:_TUNED], num_choices)
            return (keys / weights).topk(num_choices, dim=1, sorted=False).indices
        # Systematic sampling: evenly spaced points, moved from row to row.
        edges = (weights / weights.sum()).cumsum(0)
        start = torch.arange(num_rows, dtype=torch.float64).mul_(0.6180339887498949).frac_() / num_choices
        points = start[:, None] + torch.arange(num_choices, dtype=torch.float64) / num_choices
        return torch.searchsorted(edges, points).clamp_(max=num_experts - 1)

    def _weights(self, num_experts: int) -> torch.Tensor:
        if self.histogram is not None and len(self.histogram) == num_experts:
            return torch.tensor(self.histogram, dtype=torch.float64).clamp_(min=1e-9)
        weights = torch.ones(num_experts, dtype=torch.float64)
        index, count = self.share
        own = num_experts // count
        if count > 1 and 0 < own < num_experts:
            factor = min(self.factor, num_experts / own)
            weights[:] = max((num_experts - factor * own) / (num_experts - own), 1e-9)
            weights[index * own : (index + 1) * own] = factor
        return weights


def _reaching(wanted: torch.Tensor, keys: torch.Tensor, num_choices: int) -> torch.Tensor:
    """Weights with which experts get shares ``wanted`` of these rows, whose choices differ, and are random."""
    weights, num_experts = wanted.clone(), len(wanted)
    target = (wanted / wanted.sum() * len(keys) * num_choices).clamp_(max=len(keys))
    best, least = weights, float("inf")
    for _ in range(_ROUNDS):
        chosen = (keys / weights).topk(num_choices, dim=1, sorted=False).indices
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        error = float((counts - target).abs().sum())
        if error < least:
            best, least = weights.clone(), error
        weights *= (target + 0.5) / (counts + 0.5)
    return best


def unknown_scalar(dtype: torch.dtype) -> bool | int | float:
    """What a program reads: a number that is finite and not zero, and no."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0


def unknown_values(op: Any, args: Sequence[Any], like: torch.Tensor, position: int, routing: Routing) -> torch.Tensor:
    """The values of an integer or boolean result, of the size and strides of ``like``, which is on the meta device.

    It is the ``position``-th result.
    """
    found = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    name = op.overloadpacket.__name__
    if name == "topk" and position == 1:
        dim = args[2] if len(args) > 2 else -1
        last = like.movedim(dim, -1)
        chosen = routing.choose(last.numel() // max(last.shape[-1], 1), args[0].shape[dim], last.shape[-1])
        found.movedim(dim, -1).copy_(chosen.view(last.shape))
    elif name in ("sort", "argsort") and like.ndim:
        dim = next((a for a in args[1:] if type(a) is int), -1)
        found.movedim(dim, -1).copy_(torch.arange(like.shape[dim], dtype=like.dtype))
    elif like.dtype is torch.bool:
        same = len(args) > 1 and args[0] is args[1]
        found.fill_(name != "ne" if same else name in _TRUE)
    else:
        found.zero_()
    return found
