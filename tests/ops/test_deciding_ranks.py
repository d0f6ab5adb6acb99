"""Of meshes of any size, few ranks decide whether a view keeps its placements: they decide as all ranks do."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale import InterleavedShard
from vescale.ops.views import _deciding
from vescale.placements import local_region

Shape = tuple[int, ...]


def _same(
    where: Shape, mesh: Shape, old: tuple[Shape, Sequence[Placement]], new: tuple[Shape, Sequence[Placement]]
) -> bool:
    runs = (list(local_region(shape, placements, mesh, where).runs()) for shape, placements in (old, new))
    return next(runs) == next(runs)


def _shape(random_: random.Random, mesh: Shape) -> Shape:
    """Dims that axes may cut in single elements, so that placements of different dims often hold the same on some ranks."""
    sizes = [size * random_.choice((1, 1, 2, 3)) for size in mesh] + [random_.choice((1, 2, 5))]
    random_.shuffle(sizes)
    return tuple(sizes)


def _other_shape(random_: random.Random, shape: Shape) -> Shape:
    """The same number of elements: some dims merged, some split."""
    sizes = list(shape)
    for _ in range(random_.randint(1, 2)):
        at = random_.randrange(len(sizes))
        if random_.random() < 0.5 and at + 1 < len(sizes):
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        else:
            factor = random_.choice([n for n in range(1, sizes[at] + 1) if sizes[at] % n == 0])
            sizes[at : at + 1] = [factor, sizes[at] // factor]
    return tuple(sizes)


def _placements(random_: random.Random, shape: Shape, mesh: Shape) -> list[Placement]:
    found: list[Placement] = []
    for _ in mesh:
        dim = random_.randrange(len(shape))
        kind = random_.random()
        found.append(
            Replicate()
            if kind < 0.2
            else Shard(dim)
            if kind < 0.7
            else InterleavedShard(dim, random_.choice((2, 3, 4)))
        )
    return found


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_few_ranks_decide_as_all(seed: int) -> None:
    random_ = random.Random(seed)
    few = kept = 0
    for _ in range(3000 if seed == 0 else 40000):
        mesh = tuple(random_.choice((2, 2, 3)) for _ in range(random_.randint(1, 3)))
        shape = _shape(random_, mesh)
        other = _other_shape(random_, shape)
        old, new = (shape, _placements(random_, shape, mesh)), (other, _placements(random_, other, mesh))
        try:
            deciding = list(_deciding(mesh, old, new))
            found = all(_same(where, mesh, old, new) for where in deciding)
        except ValueError:
            continue  # placements that no tensor of this shape has
        every = list(itertools.product(*map(range, mesh)))
        assert found == all(_same(where, mesh, old, new) for where in every), (mesh, old, new)
        few += len(deciding) < math.prod(mesh)
        kept += found and len(deciding) < math.prod(mesh)
    assert few > 100 and kept > 20, (few, kept)
