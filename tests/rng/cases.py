"""Ops, shapes, placements and the one-device reference of the random-number tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import StridedShard
from vescale.placements import InterleavedShard, RaggedShard, Region
from vescale.rng._random_ops import RandomOp

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)

OPS = {
    "uniform": RandomOp("uniform_", (-0.5, 2.0)),
    "normal": RandomOp("normal_", (0.5, 2.0)),
    "log_normal": RandomOp("log_normal_", (0.1, 0.7)),
    "exponential": RandomOp("exponential_", (1.5,)),
    "cauchy": RandomOp("cauchy_", (0.0, 2.0)),
    "geometric": RandomOp("geometric_", (0.3,)),
    "bernoulli": RandomOp("bernoulli_", (0.3,)),
    "random": RandomOp("random_"),
    "random_to": RandomOp("random_", (7,)),
    "random_from_to": RandomOp("random_", (3, 100)),
    "random_wide": RandomOp("random_", (-5, 2**40)),
    "random_from": RandomOp("random_", (3, None)),
    "random_full": RandomOp("random_", (-(2**63), None)),
}
# The dtypes that the native op takes (int16 and int8 have too few values for some arguments).
DTYPES = {
    "geometric": (*FLOATS, torch.int64, torch.int32, torch.uint8),
    "bernoulli": (*FLOATS, *INTEGERS),
    "random": (*FLOATS, *INTEGERS),
    "random_to": (*FLOATS, torch.int64, torch.int32, torch.uint8),
    "random_from_to": (*FLOATS, torch.int64, torch.int32, torch.uint8),
    "random_wide": (torch.int64, torch.float64),
    "random_from": (torch.float32, torch.float64, torch.int64, torch.int32),
    "random_full": (torch.int64,),
}

SIZES = (0, 1, 2, 3, 5, 7, 8, 11, 16, 17, 24, 31)


def random_shape(rng: random.Random, max_dims: int = 5, max_numel: int = 1500) -> tuple[int, ...]:
    """1 to ``max_dims`` dims of even, odd and prime sizes, now and then one of size 0 or 1."""
    while True:
        shape = tuple(rng.choice(SIZES if rng.random() < 0.9 else (0, 1)) for _ in range(rng.randint(1, max_dims)))
        numel = 1
        for size in shape:
            numel *= size
        if numel <= max_numel and (numel > 0 or rng.random() < 0.3):
            return shape


def random_memory_order(rng: random.Random, num_dims: int) -> tuple[int, ...]:
    """Dims from slowest to fastest: mostly row-major."""
    order = list(range(num_dims))
    if rng.random() < 0.25:
        rng.shuffle(order)
    return tuple(order)


def empty_in_order(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    inverse = sorted(range(len(order)), key=lambda position: order[position])
    return torch.empty([shape[dim] for dim in order], dtype=dtype).permute(inverse)


def random_placements(
    rng: random.Random, shape: Sequence[int], num_ranks: int
) -> tuple[tuple[int, ...], list[Placement]]:
    """A mesh of ``num_ranks`` with one to three axes, and a placement for each."""
    meshes = [(num_ranks,)] + [(a, num_ranks // a) for a in (2, 4) if num_ranks % a == 0 and num_ranks > a]
    meshes += [(2, 2, 2)] if num_ranks == 8 else []
    mesh = rng.choice(meshes)
    dims = range(len(shape))
    placements: list[Placement] = []
    for _ in mesh:
        kind = rng.random()
        if kind < 0.2:
            placements.append(Replicate())
        elif kind < 0.75:
            placements.append(Shard(rng.choice(dims)))
        elif kind < 0.85:
            placements.append(StridedShard(rng.choice(dims), split_factor=rng.choice((1, 2, 3))))
        else:
            placements.append(InterleavedShard(rng.choice(dims), rng.choice((1, 2, 3))))
    if rng.random() < 0.3:
        placements[rng.randrange(len(mesh))] = random_ragged(rng, shape)
    return mesh, placements


def random_ragged(rng: random.Random, shape: Sequence[int]) -> Placement:
    dims = tuple(range(rng.randint(1, len(shape))))
    return RaggedShard(dims) if rng.random() < 0.7 else RaggedShard((), None, block=rng.choice((1, 3, 16)))


def coordinates(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in mesh))


def part_of(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """What a rank should hold of a whole tensor: the intervals of each dim, of which a ragged region has a range."""
    part = whole
    for dim, intervals in enumerate(region.intervals):
        cut = [part.narrow(dim, start, stop - start) for start, stop in intervals]
        part = cut[0] if len(cut) == 1 else torch.cat([part.narrow(dim, 0, 0), *cut], dim)
    if region.flat is not None:
        part = part.reshape(-1)[slice(*region.flat)]
    return part.clone(memory_format=torch.contiguous_format)


def used_generator(rng: random.Random) -> torch.Generator:
    """A generator somewhere in its stream: fresh, at the border of a block, or with a normal waiting."""
    generator = torch.Generator().manual_seed(rng.randrange(2**40))
    for _ in range(rng.randint(0, 2)):
        torch.empty(rng.choice((1, 300, 623, 624)), dtype=torch.uint8).random_(generator=generator)
    if rng.random() < 0.4:
        torch.empty(1).normal_(generator=generator)
    return generator


def clone_of(generator: torch.Generator) -> torch.Generator:
    clone = torch.Generator(generator.device)
    clone.set_state(generator.get_state())
    return clone
