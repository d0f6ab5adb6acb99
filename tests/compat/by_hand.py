"""Tensors cut and put together by hand: what placements mean, in one process and without collectives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard

from vescale.placements import FlattenedShard, InterleavedShard

__all__ = ["cut", "pieces", "put_together"]

Coordinate = tuple[int, ...]
_SCALES = (0.75, -1.5, 2.25, 1.25, -0.5)


def cut(whole: torch.Tensor, placements: Sequence[Any], mesh_shape: Sequence[int]) -> dict[Coordinate, torch.Tensor]:
    """What each rank holds of a tensor. Each local tensor has its own memory, with dims in the order of the whole one."""
    if not placements:
        return {(): whole.clone()}
    found: dict[Coordinate, torch.Tensor] = {}
    for index, part in enumerate(_cut_once(whole, placements[0], mesh_shape[0])):
        below = cut(part, placements[1:], mesh_shape[1:])
        found.update({(index, *coordinate): local for coordinate, local in below.items()})
    return found


def _cut_once(whole: torch.Tensor, placement: Any, num_ranks: int) -> list[torch.Tensor]:
    if isinstance(placement, Replicate):
        return [whole] * num_ranks
    if isinstance(placement, Partial):
        return _summands(whole, placement.reduce_op, num_ranks)
    found = pieces(whole.shape[placement.dim], placement, num_ranks)
    return [whole.index_select(placement.dim, torch.tensor(rows, dtype=torch.int64)) for rows in found]


def pieces(size: int, placement: Any, num_ranks: int) -> list[list[int]]:
    """The indices of a dim that each rank holds."""
    if isinstance(placement, FlattenedShard):
        inner = placement.inner
        if size % (placement.size * inner):  # an axis before it has cut the dims behind
            inner = size // placement.size
        step = placement.size * inner
        blocks = [range(start, start + step, inner) for start in range(0, size, step)]
        parts = [_chunks(block, num_ranks) for block in blocks]
        return [[row + i for split in parts for row in split[rank] for i in range(inner)] for rank in range(num_ranks)]
    number: int = getattr(placement, "split_factor", None) or getattr(placement, "num_chunks", None) or 1
    groups = _chunks(range(size), number)
    split = [_chunks(group, num_ranks) for group in groups]
    return [list(itertools.chain.from_iterable(parts[rank] for parts in split)) for rank in range(num_ranks)]


def _chunks(rows: range, number: int) -> list[range]:
    """As ``torch.chunk`` cuts, with empty ones at the end."""
    length = max(1, math.ceil(len(rows) / number))
    return [rows[index * length : (index + 1) * length] for index in range(number)]


def _summands(whole: torch.Tensor, reduce_op: str, num_ranks: int) -> list[torch.Tensor]:
    """Terms of a sum, or what a mean or an extremum is taken of: other ones at every rank, and of both signs."""
    if num_ranks == 1:
        return [whole]
    owner = torch.arange(whole.numel()).view(whole.shape) % num_ranks
    if whole.dtype == torch.bool and reduce_op == "avg":
        return [whole] * num_ranks
    if whole.dtype == torch.bool:  # of which a sum is true where a term is
        return [whole & (owner == rank) for rank in range(num_ranks)]
    if reduce_op == "sum" and not (whole.abs() < 1e6).all():  # of which differences are not finite
        return [torch.where(owner == rank, whole, torch.zeros_like(whole)) for rank in range(num_ranks)]
    if reduce_op in ("sum", "avg"):
        terms = [(whole * _SCALES[rank % 5] + rank).to(whole.dtype) for rank in range(num_ranks - 1)]
        if reduce_op == "avg":
            return [*terms, whole * num_ranks - sum(terms)]
        return [*terms, whole - sum(terms)]
    # Every rank has the value of some elements, and less than it, or more, of others.
    sign = -1 if reduce_op == "max" else 1
    return [torch.where(owner == rank, whole, whole + sign * (3 + rank)) for rank in range(num_ranks)]


def put_together(
    locals_: dict[Coordinate, torch.Tensor], placements: Sequence[Any], mesh_shape: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """The tensor of this shape of which ranks hold these. Raises AssertionError where they cannot hold it like this."""
    if not placements:
        (local,) = locals_.values()
        assert list(local.shape) == list(shape), f"a rank's part has the shape {list(local.shape)}, not {list(shape)}"
        return local
    placement, number = placements[0], mesh_shape[0]
    is_cut = isinstance(placement, Shard | _StridedShard | FlattenedShard | InterleavedShard)
    rows = pieces(shape[placement.dim], placement, number) if is_cut else []
    parts = []
    for index in range(number):
        part_shape = list(shape)
        if is_cut:
            part_shape[placement.dim] = len(rows[index])
        own = {where[1:]: local for where, local in locals_.items() if where[0] == index}
        parts.append(put_together(own, placements[1:], mesh_shape[1:], part_shape))
    if is_cut:
        order = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=torch.int64)
        return torch.cat(parts, placement.dim).index_select(placement.dim, order.argsort())
    if isinstance(placement, Replicate):
        for index, part in enumerate(parts):
            assert _equal(part, parts[0]), f"replicated, and rank {index} of an axis has another value than rank 0"
        return parts[0]
    together = torch.stack(parts)
    if isinstance(placement, _NormPartial):
        return (together**placement.norm_type).sum(0) ** (1 / placement.norm_type)
    return _reduced(together, placement.reduce_op).to(together.dtype)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b, equal_nan=True)) if a.dtype != torch.bool else bool(torch.equal(a, b))


def _reduced(parts: torch.Tensor, reduce_op: str) -> torch.Tensor:
    reduced: dict[str, Any] = {
        "sum": lambda: parts.any(0) if parts.dtype == torch.bool else parts.sum(0),
        "avg": lambda: parts.mean(0) if parts.is_floating_point() or parts.is_complex() else parts.sum(0) // len(parts),
        "max": lambda: parts.amax(0),
        "min": lambda: parts.amin(0),
        "product": lambda: parts.prod(0),
    }
    return reduced[reduce_op]()
