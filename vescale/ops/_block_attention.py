"""Attention of some queries to one block of keys after another: softmax over all blocks without holding them at once.

============  ==================================  ======================================================================
tensor        shape                               meaning
============  ==================================  ======================================================================
``query``     (..., heads, group, rows, size)     ``group`` query heads share a key/value head
``key``       (..., heads, keys, size)            of one block
``value``     (..., heads, keys, value size)
``mask``      broadcasts to (..., heads, group,   bool: keys that a row attends to; else added to scores
              rows, keys)
``kept``      (..., heads, group, rows, keys)     bool: weights that dropout keeps
``out``       (..., heads, group, rows,           the result over the blocks so far, in float32 for half precision
              value size)
``log_sum``   (..., heads, group, rows)           log of the sum of exp(score) over keys so far, or -inf
============  ==================================  ======================================================================

The result of a block is weighted by ``exp(its log_sum - the new log_sum)``. Rows that attend to no key are zero. Scores are
computed for a bounded number of rows at a time, forward and backward.

Source: FlashAttention's recomputation, Dao et al., arXiv:2205.14135; merged over ranks: Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from vescale.ops._ring_schedule import Meeting

__all__ = ["Attended", "BlockGradients", "accumulation_dtype"]

# Number of scores that are held at a time, unless one row has more.
_MAX_SCORES = 1 << 22


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients are accumulated."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Rows:
    """A piece of a meeting: some of its rows, and its keys."""

    rows: slice
    keys: slice
    first_row: int
    is_causal: bool

    def of(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a mask for these rows and keys; size 1 stands for all rows, or all keys."""
        if x is None:
            return None
        if x.shape[-2] > 1:
            x = x[..., self.rows, :]
        return x[..., self.keys] if x.shape[-1] > 1 else x


class _Scores:
    """Scores of queries and the keys that they attend to."""

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
        """(..., heads, group, rows, keys); -inf where a row does not attend to a key."""
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
    """(..., heads, group, n, m) @ (..., heads, m, k), without copies of ``y`` for the heads of a group."""
    return (x.flatten(-3, -2) @ y).unflatten(-2, x.shape[-3:-1])


class Attended:
    """The result of attention to the blocks so far."""

    def __init__(self, query: torch.Tensor, shape: Sequence[int], scale: float) -> None:
        """``shape`` of the result, broadcast over query, key and value."""
        self._scores = _Scores(query, scale)
        self.out = query.new_zeros(tuple(shape), dtype=self._scores.dtype)
        self.log_sum = self.out.new_full(tuple(shape[:-1]), -math.inf)

    def attend(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
    ) -> None:
        """Attend to another block. ``mask`` and ``kept`` have the columns of the block."""
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
    """Gradients, block by block, from a finished result; ``query`` accumulates the gradient of the queries."""

    def __init__(
        self, query: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, grad: torch.Tensor, scale: float
    ) -> None:
        self._scores = _Scores(query, scale)
        self._grad, self._log_sum = grad, log_sum
        self._inner = (grad.to(out.dtype) * out).sum(-1)  # for each row the mean of the gradients of its weights
        self.query = torch.zeros_like(query, dtype=self._scores.dtype)

    def add(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Add to ``gradients``: of the keys, values and mask columns of a block, in the accumulation dtype."""
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
    """Add to positions of the dim before the last, summed over dims that are broadcast."""
    target = total[..., positions, :]
    target += part.sum_to_size(target.shape)


def _finite(log_sum: torch.Tensor) -> torch.Tensor:
    """``log_sum`` with 0 for -inf, so that -inf minus it is -inf for rows that attend to no key."""
    return log_sum.masked_fill(log_sum == -math.inf, 0.0)


def _dropped(weights: torch.Tensor, kept: torch.Tensor | None, dropout: float) -> torch.Tensor:
    if kept is None:
        return weights
    return (weights * kept).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)
