"""Meshes and placements that the op tests run on, and the comparison of a DTensor with one device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from vescale.compat import spec_of
from vescale.ops import strict_placements
from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard, distribute_tensor

Layout = tuple[tuple[int, ...], tuple[Placement, ...]]

SHAPE = (8, 6)


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), shape)


def row_units(world: int) -> tuple[int, ...]:
    """Uneven shares of 8 rows; somebody owns nothing where that is possible."""
    return {1: (8,), 2: (0, 8), 3: (5, 0, 3), 4: (2, 0, 5, 1)}[world]


def element_units(world: int) -> tuple[int, ...]:
    """Uneven shares of 48 elements that cut rows."""
    return {1: (48,), 2: (13, 35), 3: (7, 41, 0), 4: (13, 0, 0, 35)}[world]


def ragged_layouts(world: int) -> list[Layout]:
    """Layouts of a tensor of ``SHAPE`` with a ragged axis."""
    whole = tuple(int(rank == world - 1) for rank in range(world))
    found: list[Layout] = [
        ((world,), (RaggedShard((0,), row_units(world)),)),
        ((world,), (RaggedShard((0, 1), element_units(world)),)),
        ((world,), (RaggedShard((), whole),)),
        ((world,), (RaggedShard(block=5),)),
    ]
    if world == 4:
        found += [
            ((2, 2), (RaggedShard((0,), (3, 5)), Replicate())),
            ((2, 2), (Replicate(), RaggedShard((0, 1), (48, 0)))),
            ((2, 2), (RaggedShard((0,), (0, 8)), Shard(1))),
            ((2, 2), (Shard(0), RaggedShard((0,), (3, 1)))),
            ((2, 2), (StridedRaggedShard((0,), (1, 3), split_factor=2), Shard(0))),
            ((2, 2), (RaggedShard((0,), (3, 5)), InterleavedShard(1, 3))),
        ]
    return found


def interleaved_layouts(world: int) -> list[Layout]:
    """Layouts of a tensor of ``SHAPE`` with an interleaved axis: even and uneven."""
    found: list[Layout] = [
        ((world,), (InterleavedShard(0, 2),)),
        ((world,), (InterleavedShard(0, 3),)),
        ((world,), (InterleavedShard(1, 3),)),
    ]
    if world == 4:
        found += [
            ((2, 2), (InterleavedShard(0, 2), Shard(1))),
            ((2, 2), (Shard(0), InterleavedShard(0, 2))),
            ((2, 2), (Replicate(), InterleavedShard(1, 3))),
        ]
    return found


def layouts(world: int) -> list[Layout]:
    return ragged_layouts(world) + interleaved_layouts(world)


def data(seed: int = 0, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def place(tensor: torch.Tensor, layout: Layout, placements: Sequence[Placement] | None = None) -> DTensor:
    """The same tensor on every rank, distributed without communication."""
    mesh = mesh_of(layout[0])
    return distribute_tensor(tensor, mesh, placements or layout[1], src_data_rank=None)


def replicated(layout: Layout) -> list[Placement]:
    return [Replicate()] * len(layout[0])


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(actual: Any, expected: Any) -> None:
    """Equal to one device: values up to the order of additions; shape and dtype exactly."""
    if isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype, (actual, expected)
        if isinstance(actual, DTensor):  # what the next op goes by
            meta = spec_of(actual).tensor_meta
            assert meta is not None and meta.shape == expected.shape and meta.dtype == expected.dtype, (meta, expected)
        torch.testing.assert_close(whole(actual), expected, equal_nan=True)
    elif isinstance(expected, float):
        assert abs(actual - expected) <= 1e-5 * max(1.0, abs(expected)), (actual, expected)
    else:
        assert actual == expected, (actual, expected)


def run_op(fn: Callable[..., Any], *args: Any, fallback: bool) -> Any:
    """Call an op; it must be local to our rules (strict mode) unless ``fallback``."""
    if fallback:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*args)
    with strict_placements():
        return fn(*args)
