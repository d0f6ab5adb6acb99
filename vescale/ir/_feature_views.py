"""Where dims of a tensor are after a view, or after a function that changes the order of dims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["merged_dims", "moved_dims", "viewed_dims"]


def _dim_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of both shapes with equal numbers of elements; dims of size 1 are left out."""
    old = [d for d, size in enumerate(before) if size != 1]
    new = [d for d, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(before[d] for d in left)) != (b := math.prod(after[d] for d in right)):
            if a < b and i < len(old):
                left.append(old[i])
                i += 1
            elif a > b and j < len(new):
                right.append(new[j])
                j += 1
            else:
                return found
        found.append((left, right))
    return found


def viewed_dims(
    dims: tuple[int, ...], merged: int, before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """(The dims that run over features after a view, outermost first; elements of other dims that are merged with the
    outermost one, before it). ``merged``: how many were before the view. None where a cut of them is no cut of a dim."""
    outermost: list[int] = []
    others: list[int] = []
    for left, right in _dim_groups(before, after):
        own = [d for d in dims if d in left]
        if dims[0] in own:
            merged *= math.prod(before[d] for d in left[: left.index(dims[0])])
            outermost = list(right)
            while len(outermost) > 1 and merged > 1 and merged % after[outermost[0]] == 0:
                merged //= after[outermost.pop(0)]
        elif own and (set(own) == set(left) or left[0] in own):
            others += right if set(own) == set(left) else right[:1]
    return ((*outermost, *others), merged) if outermost else None


def merged_dims(dims: tuple[int, ...], before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The dims of the result that consist of some of ``dims`` alone."""
    return tuple(d for left, right in _dim_groups(before, after) if set(left) <= set(dims) for d in right)


def moved_dims(
    name: str, dims: tuple[int, ...], x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor
) -> tuple[int, ...]:
    """Where dims are after a function that changes their order; without those that are gone."""
    ndim = x.ndim
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = (int(value) % ndim for value in (*args[1:], *kwargs.values())[:2])
        swapped = {first: second, second: first}
        return tuple(swapped.get(d, d) for d in dims)
    if name in ("t", "T", "mT"):
        return tuple(2 * ndim - 3 - d if d >= ndim - 2 else d for d in dims) if ndim > 1 else dims
    if name == "permute":
        given = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        order = [int(value) % ndim for value in given]
        return tuple(order.index(d) for d in dims)
    if name == "unsqueeze":
        at = int((*args[1:], *kwargs.values())[0]) % (ndim + 1)
        return tuple(d + (at <= d) for d in dims)
    if name == "movedim":
        marked = torch.empty(tuple(range(2, 2 + ndim)), device="meta").movedim(*args[1:], **kwargs)
        return tuple(list(marked.shape).index(d + 2) for d in dims)
    if name == "squeeze":
        given = (*args[1:], *kwargs.values())
        chosen = (
            {int(d) % ndim for d in (given[0] if isinstance(given[0], tuple | list) else given[:1])} if given else None
        )
        gone = {d for d in range(ndim) if x.shape[d] == 1 and (chosen is None or d in chosen)}
        return tuple(d - sum(g < d for g in gone) for d in dims if d not in gone)
    return ()
