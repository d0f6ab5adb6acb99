"""Index maps against the same operations on tensors whose values are their own positions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from vescale.checkpoint._index_map import MappedTensor, NotAnIndexMapError, row_major, source_axes


def values_of(mapped: MappedTensor, sources: dict[str, torch.Tensor]) -> torch.Tensor:
    """Every part copied by its strides; parts must cover the tensor and not overlap."""
    found = torch.full(tuple(mapped.shape), -1, dtype=torch.int64)
    for part in mapped.parts:
        block = tuple(slice(at, at + size) for at, size in zip(part.offset, part.sizes))
        assert (found[block] == -1).all(), "parts overlap"
        found[block] = sources[part.source].as_strided(part.sizes, part.strides, part.start)
    return found


def positions(shape: tuple[int, ...], first: int = 0) -> torch.Tensor:
    return torch.arange(first, first + math.prod(shape)).view(shape)


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "chunk and join": lambda x: torch.cat([x.chunk(3, 1)[1], x.chunk(3, 1)[0]], 1),
    "interleave": lambda x: x.reshape(2, 3, 6, 4).transpose(1, 2).reshape(12, 6, 2)[:, :, 0],
    "split heads": lambda x: x.view(2, 2, 3, 2, 2).transpose(1, 2).reshape(12, 4),
    "columns": lambda x: x[1::3, 1:].t().contiguous(),
    "experts": lambda x: torch.stack(list(x.unbind(0)), 1)[None].squeeze(),
    "flat and back": lambda x: x[2:9].reshape(-1)[3:25].reshape(11, 2),
    "join with ones": lambda x: x.view(1, 12, 1, 4).permute(3, 0, 1, 2).reshape(4, 12),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    program = PROGRAMS[name]
    shape = (12, 12) if name == "interleave" else (12, 4)
    real = positions(shape)
    mapped = program(MappedTensor.of("x", shape, torch.int64))
    assert isinstance(mapped, MappedTensor)
    torch.testing.assert_close(values_of(mapped, {"x": real}), program(real).contiguous(), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4)))
    real = positions(shape)
    mapped: torch.Tensor = MappedTensor.of("x", shape, torch.int64)
    for _ in range(6):
        program = _draw(draw, tuple(real.shape))
        real, mapped = program(real).contiguous(), program(mapped)
        assert tuple(real.shape) == tuple(mapped.shape)
    assert isinstance(mapped, MappedTensor)
    torch.testing.assert_close(values_of(mapped, {"x": positions(shape)}), real, rtol=0, atol=0)


def _draw(draw: random.Random, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    kind = draw.choice(["reshape", "permute", "slice", "join", "double"])
    if kind == "permute":
        dims = draw.sample(range(len(shape)), len(shape))
        return lambda x: x.permute(dims)
    dim = draw.randrange(len(shape))
    if kind == "slice":
        low = draw.randrange(shape[dim])
        step = draw.choice([1, 1, 2])
        return lambda x: x[(slice(None),) * dim + (slice(low, None, step),)]
    if kind == "join":
        at = draw.randrange(shape[dim])
        return lambda x: torch.cat([x.narrow(dim, at, shape[dim] - at), x.narrow(dim, 0, at)], dim)
    if kind == "double" and math.prod(shape) < 500:
        return lambda x: torch.stack([x, x], dim)
    rest, sizes = math.prod(shape), []
    while rest > 1 and len(sizes) < 4:
        size = draw.choice([n for n in range(1, rest + 1) if rest % n == 0])
        sizes.append(size)
        rest //= size
    return lambda x: x.reshape(*sizes, rest)


def test_what_computes_values_is_refused() -> None:
    mapped = MappedTensor.of("x", (4, 4), torch.bfloat16)
    for program in (lambda x: x * 2, lambda x: x.float(), lambda x: torch.cat([x, torch.zeros(4, 4)])):
        with pytest.raises(NotAnIndexMapError):
            program(mapped)


def test_source_axes() -> None:
    mapped = MappedTensor.of("x", (4, 6), torch.float32)
    (part,) = mapped.t()[1::2, 1:3].parts
    assert source_axes(part, (4, 6)) == ((1, 1), ((1, 2), (0, 1)))
    (flat,) = mapped.reshape(24).parts
    assert source_axes(flat, (4, 6)) is None
    assert row_major((2, 3, 4)) == (12, 4, 1)
