"""Initializers that draw again until no element is rejected: on a part of a tensor, or for their draws only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vescale.placements import Region
from vescale.rng._elementwise_part import Part

__all__ = ["fill_part", "replay_draws"]

# The size of the ranges of a whole tensor that are generated only to find rejections.
_CHUNK_ELEMENTS = 1 << 20


def fill_part(
    initializer: Callable[..., Any],
    arguments: tuple[Any, ...],
    local: torch.Tensor,
    region: Region,
    global_strides: tuple[int, ...],
    generator: torch.Generator | None,
    anywhere: Callable[[bool], bool] = bool,
) -> None:
    """Run an initializer of elementwise ops, such as ``nn.init``'s ``trunc_normal_``, on one part of a whole tensor.

    The values are those of one device. ``anywhere(flag)`` returns whether a flag is set on any part of the tensor. Without
    it, the rounds end when this part has no rejected element: the values are the same, but the generator is not advanced as
    far.
    """
    initializer(Part.of(local, region, global_strides, anywhere), *arguments, generator)


def replay_draws(
    initializer: Callable[..., Any],
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    global_strides: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Advance ``generator`` as the initializer on a whole tensor would: with O(chunk) memory, in the time of one device."""
    start = generator.get_state()
    furthest, most = start, 0
    for region in _stretches(shape):
        generator.set_state(start)
        rounds = 0

        def count(flag: bool) -> bool:
            nonlocal rounds
            rounds += 1
            return flag

        local = torch.empty(region.local_shape, dtype=dtype, device=generator.device)
        fill_part(initializer, arguments, local, region, global_strides, generator, count)
        if rounds >= most:
            furthest, most = generator.get_state(), rounds
    generator.set_state(furthest)


def _stretches(shape: tuple[int, ...]) -> Iterator[Region]:
    """Split a shape into row-major ranges; at least one, which may be empty."""
    whole = tuple(((0, size),) for size in shape)
    numel = math.prod(shape)
    for start in range(0, max(numel, 1), _CHUNK_ELEMENTS):
        yield Region(shape, whole, (start, min(start + _CHUNK_ELEMENTS, numel)))
