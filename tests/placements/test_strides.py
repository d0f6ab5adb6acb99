"""Strides of whole tensors that DTensors made from local tensors have."""

from __future__ import annotations

import itertools
import random

import torch

from vescale.placements import stride_like
from vescale.rng._stream_spans import stream_order


def test_all_ranks_tell_the_memory_order_of_the_whole() -> None:
    """Also one that holds a single index of a dim, whose stride says nothing by itself: random fills follow that order."""
    rng = random.Random(0)
    seen = 0
    for num_dims in (2, 3, 4):
        for order in itertools.permutations(range(num_dims)):
            for _ in range(20):
                shape = [rng.choice((2, 3, 4, 6)) for _ in range(num_dims)]
                lengths = list(shape)
                lengths[rng.randrange(num_dims)] = rng.choice((0, 1, 2))  # what a shard leaves of it
                inverse = sorted(range(num_dims), key=order.__getitem__)
                whole = torch.empty([shape[dim] for dim in order]).permute(inverse)
                local = torch.empty([lengths[dim] for dim in order]).permute(inverse)
                strides = stride_like(local, shape)
                assert stream_order(shape, strides) == order == stream_order(shape, whole.stride())
                assert strides == whole.stride()
                seen += 1 in lengths
    assert seen > 100
