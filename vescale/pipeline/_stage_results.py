"""What a last stage computes the loss of: what enters it, and what its modules return, of several micro-batches.

A loss that depends on rows of several micro-batches is computed once, on the last stage, of the results of all: forwards
without gradients come first, and each micro-batch's backward begins with the gradients of its part of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.pipeline._row_flow import Rows

Results = dict[Any, Any]
"""Leaves by number of the call; at -1 what enters the stage, and by number and place what hooks in a call keep."""


def together(parts: Sequence[Results], rows: Mapping[int, Sequence[Rows | None]]) -> Results:
    """Those of all micro-batches; what is the same in each is that of the first. Communication: of pending sums."""

    def joined(leaves: Sequence[Any], where: Rows | None) -> Any:
        if where is None:
            return leaves[0]
        dim, outer = where
        whole = [without_sums(leaf) for leaf in leaves]
        if outer == 1:
            return torch.cat(whole, dim)
        return torch.cat([leaf.unflatten(dim, (outer, -1)) for leaf in whole], dim + 1).flatten(dim, dim + 1)

    return {
        place: [joined(given, r) for *given, r in zip(*(part[place] for part in parts), rows[place])] for place in rows
    }


def parts_of(results: Results, rows: Mapping[int, Sequence[Rows | None]], count: int) -> list[Results]:
    """Of each micro-batch; the inverse of :func:`together`."""

    def part(leaf: Any, where: Rows | None, n: int) -> Any:
        if where is None or leaf is None:
            return leaf
        dim, outer = where
        if outer == 1:
            return leaf.tensor_split(count, dim)[n]
        return leaf.unflatten(dim, (outer, -1)).tensor_split(count, dim + 1)[n].flatten(dim, dim + 1)

    return [
        {place: [part(leaf, where, n) for leaf, where in zip(results[place], rows[place])] for place in rows}
        for n in range(count)
    ]


def seeds_of(
    leaves: Results, rows: Mapping[int, Sequence[Rows | None]], count: int
) -> list[dict[tuple[int, int], torch.Tensor]]:
    """After a backward: for each micro-batch, the gradients of its part of the leaves, by place and number."""
    gradients = {place: [getattr(leaf, "grad", None) for leaf in leaves[place]] for place in rows}
    found: list[dict[tuple[int, int], torch.Tensor]] = []
    for n, part in enumerate(parts_of(gradients, rows, count)):
        seeds = {(place, k): g for place, own in part.items() for k, g in enumerate(own) if g is not None}
        # What is the same in each micro-batch has one gradient, which the first one takes.
        found.append({key: g for key, g in seeds.items() if n == 0 or rows[key[0]][key[1]] is not None})
    return found


def as_leaves(results: Results) -> Results:
    return mapped(lambda x: x.detach().requires_grad_(), results)


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """Without its graph."""
    return tensor.detach().clone()


def mapped(change: Callable[[torch.Tensor], Any], results: Results) -> Results:
    """With other tensors of floating-point numbers; what hooks have kept stays."""
    return {
        place: leaves
        if isinstance(leaves, dict)
        else [change(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in leaves]
        for place, leaves in results.items()
    }


def seeded(results: Results, seeds: Mapping[tuple[int, int], torch.Tensor]) -> tuple[list[Any], list[Any]]:
    """The results at which a backward begins, with their gradients. Communication: where these have other placements."""
    roots, gradients = [], []
    for (place, n), gradient in seeds.items():
        root = results[place][n]
        if root.requires_grad:
            roots.append(root)
            gradients.append(_placed_as(gradient, root))
    return roots, gradients


def without_sums(leaf: Any) -> Any:
    if not isinstance(leaf, DTensor) or not any(p.is_partial() for p in leaf.placements):
        return leaf
    return leaf.redistribute(leaf.device_mesh, [Replicate() if p.is_partial() else p for p in leaf.placements])


def _placed_as(gradient: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor) or not isinstance(of, DTensor):
        return gradient
    return gradient.redistribute(of.device_mesh, [Replicate() if p.is_partial() else p for p in of.placements])
