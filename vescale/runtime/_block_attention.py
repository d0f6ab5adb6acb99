"""Attention of some queries to one block of keys after another: softmax over all blocks without having them at once.

============  ==================================  ======================================================================
tensor        shape                               meaning
============  ==================================  ======================================================================
``query``     (..., heads, group, rows, size)     ``group`` query heads share a key/value head
``key``       (..., heads, keys, size)            of one block
``value``     (..., heads, keys, value size)
``mask``      broadcasts to (..., heads, group,   bool: which keys a row meets; else added to the scores
              rows, keys)
``kept``      (..., heads, group, rows, keys)     bool: which weights dropout keeps
``out``       (..., heads, group, rows,           the result over the blocks so far, in float32 for half precision
              value size)
``log_sum``   (..., heads, group, rows)           log of the sum of exp(score) over keys so far, or -inf
============  ==================================  ======================================================================

A block's result is weighed by ``exp(its log_sum - the new log_sum)``. Rows that meet no key at all are zero. Scores exist
for a bounded number of rows at a time, forward and backward.

Source: FlashAttention's recomputation, Dao et al., arXiv:2205.14135; merged over ranks: Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vescale.ir import Meeting

__all__ = ["Attended", "BlockGradients", "accumulation_dtype"]

# Scores that exist at a time, unless one row has more.
_MAX_SCORES = 1 << 22


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What results and gradients are added up in."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Rows:
    """What a piece of a meeting works on: a piece of the rows, and a range of the keys."""

    rows: slice
    keys: slice
    first_row: int
    is_causal: bool

    def of(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Its part of a mask, which may be one for all rows, or for all keys."""
        if x is None:
            return None
        if x.shape[-2] > 1:
            x = x[..., self.rows, :]
        return x[..., self.keys] if x.shape[-1] > 1 else x


class _Scores:
    """The scores of some rows and keys, where they meet."""

    def __init__(self, query: torch.Tensor, scale: float) -> None:
        self.query, self.scale = query, scale
        self.dtype = accumulation_dtype(query.dtype)

    def pieces(self, meetings: Sequence[Meeting]) -> Iterator[_Rows]:
        for meeting in meetings:
            (first, end), (start, stop) = meeting.rows, meeting.keys
            a_row = math.prod(self.query.shape[:-2]) * (stop - start)
            step = max(1, _MAX_SCORES // max(a_row, 1))
            for row in range(first, end, step):
                yield _Rows(slice(row, min(row + step, end)), slice(start, stop), row - first, meeting.is_causal)

    def of(self, piece: _Rows, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(..., heads, group, rows, keys); -inf where a row does not meet a key."""
        scores = grouped_product(self.query_of(piece), key.transpose(-1, -2)).mul_(self.scale)
        mask = piece.of(mask)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        if piece.is_causal:
            num_rows, num_keys = scores.shape[-2:]
            rows = torch.arange(piece.first_row, piece.first_row + num_rows, device=scores.device)
            scores.masked_fill_(torch.arange(num_keys, device=scores.device) > rows.unsqueeze(1), -math.inf)
        return scores

    def query_of(self, piece: _Rows) -> torch.Tensor:
        return self.query[..., piece.rows, :].to(self.dtype)


def grouped_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(..., heads, group, n, m) @ (..., heads, m, k), without a copy of ``y`` for each of the group."""
    return (x.flatten(-3, -2) @ y).unflatten(-2, x.shape[-3:-1])


class Attended:
    """What rows have of the blocks that they have met."""

    def __init__(self, query: torch.Tensor, shape: Sequence[int], scale: float) -> None:
        """``shape`` of the result, broadcast over query, key and value."""
        self._scores = _Scores(query, scale)
        self.out = query.new_zeros(tuple(shape), dtype=self._scores.dtype)
        self.log_sum = self.out.new_full(tuple(shape[:-1]), -math.inf)

    def meet(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
    ) -> None:
        """Another block. ``mask`` and ``kept`` are its columns of them."""
        for piece in self._scores.pieces(meetings):
            keys, values = (x[..., piece.keys, :].to(self._scores.dtype) for x in (key, value))
            scores = self._scores.of(piece, keys, mask)
            log_sum = scores.logsumexp(-1)
            weights = (scores - _finite(log_sum).unsqueeze(-1)).exp_()
            weights = _dropped(weights, piece.of(kept), dropout)
            self._merge(piece.rows, grouped_product(weights, values), log_sum)

    def _merge(self, rows: slice, out: torch.Tensor, log_sum: torch.Tensor) -> None:
        before = self.log_sum[..., rows]
        after = torch.logaddexp(before, log_sum)
        known = _finite(after)
        own, other = ((x - known).exp_().unsqueeze(-1) for x in (before, log_sum))
        self.out[..., rows, :] = self.out[..., rows, :] * own + out * other
        self.log_sum[..., rows] = after


class BlockGradients:
    """Gradients from a finished result; that of the queries is added up here."""

    def __init__(
        self, query: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, grad: torch.Tensor, scale: float
    ) -> None:
        self._scores = _Scores(query, scale)
        self._grad, self._log_sum = grad, log_sum
        self._inner = (grad.to(out.dtype) * out).sum(-1)  # of each row: the mean of its weights' gradients
        self.query = torch.zeros_like(query, dtype=self._scores.dtype)

    def meet(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Adds to the gradients of a block's keys, values and columns of the mask, in the accumulation's dtype."""
        grad_key, grad_value, grad_mask = gradients
        for piece in self._scores.pieces(meetings):
            keys, values = (x[..., piece.keys, :].to(self._scores.dtype) for x in (key, value))
            log_sum = _finite(self._log_sum[..., piece.rows]).unsqueeze(-1)
            weights = (self._scores.of(piece, keys, mask) - log_sum).exp_()
            grad = self._grad[..., piece.rows, :].to(self._scores.dtype)
            used = piece.of(kept)
            _add(grad_value, piece.keys, _over_group(_dropped(weights, used, dropout), grad))
            slope = _dropped(grouped_product(grad, values.transpose(-1, -2)), used, dropout)
            slope = (slope - self._inner[..., piece.rows].unsqueeze(-1)) * weights
            if grad_mask is not None:
                target = piece.of(grad_mask)
                assert target is not None
                target += slope.sum_to_size(target.shape)
            slope.mul_(self._scores.scale)
            _add(self.query, piece.rows, grouped_product(slope, keys))
            _add(grad_key, piece.keys, _over_group(slope, self._scores.query_of(piece)))


def _over_group(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(..., heads, keys, size) of weights (..., heads, group, rows, keys) and x (..., heads, group, rows, size)."""
    return weights.flatten(-3, -2).transpose(-1, -2) @ x.flatten(-3, -2)


def _add(total: torch.Tensor, positions: slice, part: torch.Tensor) -> None:
    """Adds to positions of the dim before the last, summed over dims that the total has once for all."""
    target = total[..., positions, :]
    target += part.sum_to_size(target.shape)


def _finite(log_sum: torch.Tensor) -> torch.Tensor:
    """For subtracting: rows that have met nothing have -inf less 0, and not less itself."""
    return log_sum.masked_fill(log_sum == -math.inf, 0.0)


def _dropped(weights: torch.Tensor, kept: torch.Tensor | None, dropout: float) -> torch.Tensor:
    if kept is None:
        return weights
    return (weights * kept).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)
