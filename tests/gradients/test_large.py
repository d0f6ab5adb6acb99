"""Gradients of 1 MiB and more on the CPU: copied to their bucket when they come, and divided by the way; alone in a bucket
reduced where they are."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.device import device_type
from tests.gradients.test_reducer import assert_equal_gradients, data, meshes
from tests.ranks import RankPools
from vescale import GradientReducer

WIDTH = 364
assert 8 * WIDTH**2 >= 2**20


def compare(bucket_bytes: int | list[int], order: tuple[int, ...], no_sync: bool = False) -> GradientReducer:
    """Averages, layers used in an order and recomputed in backward; ``no_sync``: every step accumulates two backwards."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)])
    reference = copy.deepcopy(model)
    reducer = GradientReducer(model, meshes((dist.get_world_size(),)), bucket_bytes=bucket_bytes)
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss(layers: nn.ModuleList, step: int, index: int, recompute: bool) -> torch.Tensor:
        x = data(step, index, 2, WIDTH).requires_grad_()
        for number in order:
            x = torch.tanh(checkpoint(layers[number], x, use_reentrant=True) if recompute else layers[number](x))
        return x.square().sum()

    for step in range(5):
        for layers in (model, reference):
            layers.zero_grad()
        micros = [10 * step, 10 * step + 1] if no_sync else [10 * step]
        for micro in micros[:-1]:
            with reducer.no_sync():
                loss(model, micro, rank, recompute=True).backward()
        loss(model, micros[-1], rank, recompute=True).backward()
        for micro in micros:
            (sum(loss(reference, micro, index, recompute=False) for index in range(world)) / world).backward()
        assert_equal_gradients(model, reference)
    return reducer


def with_small_ones() -> None:
    for no_sync in (False, True):
        reducer = compare([2**23], (0, 1), no_sync)
        (bucket,) = reducer.buckets
        heard = {slot.name for slot in bucket.slots if slot.is_notified}
        if device_type() == "cpu":  # only there copies are worth a call each
            assert {"0.weight", "1.weight"} <= heard and len(heard) < 4, "large ones are copied when they come"


def alone() -> None:
    for no_sync in (False, True):
        assert compare(1, (0, 1), no_sync).num_buckets == 4


def several_times() -> None:
    """A layer in two recomputed parts brings its gradients twice."""
    for bucket_bytes in ([1], [2**23]):
        compare(bucket_bytes, (0, 1, 0))


@pytest.mark.parametrize("case", [with_small_ones, alone, several_times], ids=lambda case: case.__name__)
def test_large_gradients(ranks: RankPools, case: Callable[[], None]) -> None:
    ranks.run(case, world_size=2, timeout=60)
