"""AdamW8bit on DTensors: every rank of many layouts has its part of one device's parameters and states, bit for bit."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.device import device_type
from tests.optim.meshes import communicated
from tests.optim.reference_adamw8bit import flat_blocks, row_blocks
from tests.optim.test_adamw8bit import gradient
from vescale.comm import record_comms
from vescale.compat import StridedShard
from vescale.optim import AdamW8bit, adamw8bit_layout
from vescale.optim._blocks import FlatBlocks, RowBlocks
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    coordinates,
    distribute_tensor,
    local_region,
    normalize_placements,
)

R, S = Replicate, Shard
FLAT, TILES = FlatBlocks(64), RowBlocks(8, 32)

# mesh, shape, placements; no block of 64 elements is cut
WHOLE: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((1,), (33, 77), [S(0)]),
    ((2,), (64, 48), [S(0)]),
    ((3,), (64, 64), [S(0)]),  # 22, 22, 20 rows
    ((4,), (5, 128), [S(0)]),  # 2, 2, 1, 0 rows
    ((4,), (1, 4096), [S(0)]),  # all on the first rank
    ((2,), (9, 256), [S(1)]),
    ((4,), (3, 5, 512), [S(2)]),
    ((2,), (4, 6, 64), [S(1)]),
    ((3,), (64 * 66,), [S(0)]),
    ((4,), (50, 83), [RaggedShard((0, 1), (10, 0, 30, 25), block=64)]),
    ((4,), (4150,), [RaggedShard((0,), block=64)]),
    ((2,), (61, 70), [RaggedShard((), (0, 1))]),
    ((4,), (64, 64), [R()]),
    ((2, 2), (64, 64), [R(), S(0)]),  # HSDP
    ((2, 2), (61, 70), [R(), RaggedShard(block=64)]),
    ((2, 2), (64, 128), [S(0), S(1)]),
    ((2, 2), (64, 128), [S(1), S(0)]),
    ((2, 2), (64, 64), [StridedShard(0, split_factor=2), S(0)]),  # FSDP2 over tensor parallelism
    ((2, 2), (80, 64), [RaggedShard(block=64), S(0)]),  # fully_shard over tensor parallelism
    ((2, 2), (80, 48), [RaggedShard(block=64), S(0)]),
    ((2, 2), (40, 128), [RaggedShard(block=64), S(1)]),
    ((2, 2), (4, 30, 64), [S(0), RaggedShard(block=64)]),  # experts
    ((2, 2), (4, 30, 64), [RaggedShard(block=64), S(0)]),
    ((2, 2), (4, 30, 64), [StridedShard(1, split_factor=1), S(0)]),
    ((2,), (192, 64), [InterleavedShard(0, 3)]),
    ((2, 2), (192, 64), [RaggedShard(block=64), InterleavedShard(0, 3)]),
    ((2, 2, 2), (4, 32, 128), [S(0), S(1), S(2)]),
    ((2, 2, 2), (4, 32, 128), [R(), RaggedShard(block=64), S(2)]),
]
# the same for blocks of 8 x 32
TILED: list[tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = [
    ((1,), (33, 127), [S(0)]),
    ((2,), (64, 70), [S(0)]),
    ((3,), (67, 70), [RaggedShard(block=8 * 70)]),
    ((4,), (50, 96), [RaggedShard((0,), (24, 0, 16, 10))]),
    ((4,), (30, 200), [S(0)]),
    ((2,), (60, 128), [S(1)]),
    ((2,), (5000,), [RaggedShard(block=32)]),
    ((2, 2), (64, 128), [S(1), S(0)]),
    ((2, 2), (64, 80), [StridedShard(0, split_factor=2), S(0)]),
    ((2, 2), (64, 80), [RaggedShard(block=8 * 80), S(0)]),
    ((2, 2), (64, 128), [RaggedShard(block=8 * 64), S(1)]),
    ((2, 2), (4, 30, 64), [S(0), RaggedShard(block=30 * 64)]),
    ((3,), (7, 24, 40), [RaggedShard(block=8 * 40)]),
    ((3,), (7, 21, 40), [RaggedShard(block=21 * 40)]),
    ((2, 2), (4, 32, 64), [S(1), S(2)]),
    ((2, 2), (64, 64), [R(), S(0)]),
]


@pytest.fixture
def meshes() -> Iterator[Any]:
    """``meshes(shape)``: that mesh as each of its ranks sees it, one after the other."""

    def each(shape: tuple[int, ...]) -> Iterator[Any]:
        for rank in range(math.prod(shape)):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
            try:
                names = ("a", "b", "c")[: len(shape)]
                yield init_device_mesh(device_type(), shape, mesh_dim_names=names)
            finally:
                dist.destroy_process_group()

    yield each


def train(parameter: torch.nn.Parameter, steps: int, place: Any, **options: Any) -> dict[str, torch.Tensor]:
    optimizer = AdamW8bit([("weight", parameter)], lr=1e-2, min_numel=3000, **options)
    for step in range(steps):
        parameter.grad = place(gradient(parameter.shape, step).to(parameter.dtype))
        optimizer.step()
    assert "weight" in optimizer.param_groups[0]["param_names"]
    return {"weight": parameter.detach(), **optimizer.state[parameter]}


@pytest.mark.parametrize("case", [*(("flat", *c) for c in WHOLE), *(("tiles", *c) for c in TILED)], ids=str)
def test_parts_of_one_device(case: Any, meshes: Any) -> None:
    kind, mesh_shape, shape, placements = case
    blocks: dict[str, Any] = {"block_size": 64} if kind == "flat" else {"block": (8, 32)}
    torch.manual_seed(0)
    values = torch.randn(shape)
    expected = train(torch.nn.Parameter(values.clone()), 20, lambda g: g, **blocks)
    for mesh in meshes(mesh_shape):
        cut = normalize_placements(placements, shape, mesh)

        def place(tensor: torch.Tensor, mesh: Any = mesh, cut: Any = cut) -> DTensor:
            return distribute_tensor(tensor.clone(), mesh, cut, src_data_rank=None)

        with record_comms() as ledger:
            found = train(torch.nn.Parameter(place(values)), 20, place, **blocks)
        assert not communicated(ledger)
        assert found.keys() == expected.keys()
        for key, value in found.items():
            if key == "step":
                assert value == 20
                continue
            assert (
                isinstance(value, DTensor) and value.shape == expected[key].shape and value.dtype == expected[key].dtype
            )
            part = distribute_tensor(expected[key], mesh, value.placements, src_data_rank=None)
            assert torch.equal(value.to_local(), part.to_local()), key
            if "max" not in key:
                assert value.placements == cut


@pytest.mark.parametrize("options", [{"stochastic_rounding": True}, {}, {"state_dtype": torch.bfloat16}], ids=str)
def test_bfloat16_parts_of_one_device(options: dict[str, Any], meshes: Any) -> None:
    layouts: list[Any] = [
        ((3,), (64, 64), [S(0)]),
        ((2, 2), (64, 128), [RaggedShard(block=64), S(1)]),
        ((2, 2), (64, 64), [R(), S(0)]),
        ((4,), (2, 5), [S(1)]),
    ]
    for mesh_shape, shape, placements in layouts:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
        expected = train(torch.nn.Parameter(values.clone()), 3, lambda g: g, block_size=64, **options)
        for mesh in meshes(mesh_shape):
            cut = normalize_placements(placements, shape, mesh)

            def place(tensor: torch.Tensor, mesh: Any = mesh, cut: Any = cut) -> DTensor:
                return distribute_tensor(tensor.clone(), mesh, cut, src_data_rank=None)

            found = train(torch.nn.Parameter(place(values)), 3, place, block_size=64, **options)
            for key in expected.keys() - {"step"}:
                part = distribute_tensor(expected[key], mesh, found[key].placements, src_data_rank=None)
                assert torch.equal(found[key].to_local(), part.to_local()), key


def owners(shape: Sequence[int], placements: Sequence[Any], mesh_shape: tuple[int, ...]) -> dict[tuple[int, ...], Any]:
    """By brute force: the global indices of each coordinate, in local order."""
    return {
        at: np.array(
            [i for a, n in local_region(shape, placements, mesh_shape, at).runs() for i in range(a, a + n)],
            dtype=np.int64,
        )
        for at in coordinates(mesh_shape)
    }


PLACEMENTS = [
    R(),
    S(0),
    S(1),
    RaggedShard(),
    RaggedShard(block=64),
    RaggedShard((0, 1), block=96),
    StridedShard(0, split_factor=2),
    InterleavedShard(0, 2),
    InterleavedShard(1, 2),
]


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (3, 2)], ids=str)
def test_cuts_and_grids_by_brute_force(mesh_shape: tuple[int, ...]) -> None:
    """A block is cut exactly if its elements are on several coordinates; the grid's parts follow the blocks' order."""
    counts = {"cut": 0, "whole": 0, "uneven": 0}
    shapes = [(16, 64), (6, 96), (12, 32), (7, 128), (1, 300), (4, 8, 64), (2, 12, 32)]
    for shape, chosen in itertools.product(shapes, itertools.product(PLACEMENTS, repeat=len(mesh_shape))):
        try:
            placements = normalize_placements(chosen, shape, mesh_shape)
            held = owners(shape, placements, mesh_shape)
        except ValueError:
            continue
        for blocks in (FLAT, TILES):
            is_row = math.prod(shape[:-1]) == 1
            groups = (
                row_blocks(shape, 8, 32)
                if blocks is TILES and not is_row
                else flat_blocks(math.prod(shape), 64 if blocks is FLAT else 32)
            )
            block_of = np.empty(math.prod(shape), dtype=np.int64)
            for number, elements in enumerate(groups):
                block_of[elements] = number
            is_cut = False
            for elements in held.values():
                numbers, sizes = np.unique(block_of[elements], return_counts=True)
                is_cut |= any(len(groups[number]) != size for number, size in zip(numbers, sizes))
            found = blocks.first_cut(shape, placements, mesh_shape)
            if is_cut:
                counts["cut"] += 1
                assert found is not None, (shape, placements)
                elements = held[found.coordinate]
                number = np.ravel_multi_index(
                    ast.literal_eval(found.block) if blocks is TILES and not is_row else (int(found.block),),
                    blocks.grid(shape),
                )
                assert 0 <= np.isin(groups[number], elements).sum() < len(groups[number]), (shape, placements, found)
                continue
            assert found is None, (shape, placements, found)
            counts["whole"] += 1
            try:
                grid = blocks.grid_placements(shape, placements, mesh_shape)
            except ValueError:
                counts["uneven"] += 1
                cut = [R() if isinstance(p, RaggedShard) else p for p in placements]
                sizes = {len(elements) for elements in owners(shape, cut, mesh_shape).values()}
                assert len(sizes) > 1, (shape, placements)
                continue
            for at, numbers in owners(blocks.grid(shape), grid, mesh_shape).items():
                local = block_of[held[at]]
                parts = blocks.parts(local_region(shape, placements, mesh_shape, at))
                assert sum(part.num_blocks for part in parts) == len(numbers), (shape, placements)
                assert sum(part.numel for part in parts) == len(local)
                assert sorted(set(local.tolist())) == numbers.tolist(), (shape, placements, grid)
    assert counts["cut"] > 20 and counts["whole"] > 20
    assert counts["uneven"] <= 0.25 * counts["whole"], counts


def test_cut_blocks_are_refused(meshes: Any) -> None:
    texts = set()
    for mesh in meshes((2, 2)):
        parameter = torch.nn.Parameter(
            distribute_tensor(torch.randn(90, 50), mesh, [RaggedShard((0,)), Replicate()], src_data_rank=None)
        )
        with pytest.raises(ValueError, match="must not be divided") as error:
            AdamW8bit([("layers.0.weight", parameter)])
        texts.add(str(error.value))
        AdamW8bit([parameter], min_numel=4501)
        AdamW8bit([parameter], block_size=50)
        AdamW8bit([parameter], state_dtype=torch.bfloat16)
        optimizer = AdamW8bit([torch.nn.Parameter(torch.zeros(2))])
        with pytest.raises(ValueError, match="group 1, parameter 0"):
            optimizer.add_param_group({"params": [parameter]})
        assert len(optimizer.param_groups) == 1 and len(optimizer.state) == 1
        rows = torch.nn.Parameter(
            distribute_tensor(torch.randn(64, 128), mesh, [RaggedShard(block=256), Shard(1)], src_data_rank=None)
        )
        with pytest.raises(
            ValueError, match=r"S\(1\) on 'b' creates such parts. .*with block_size=64, with which no block is divided"
        ):
            AdamW8bit([rows])
        AdamW8bit([rows], block_size=64)
        with pytest.raises(ValueError, match=r"block \(0, 0\) .*rows 0 to 63, columns 0 to 49.*Rows\(64\)"):
            AdamW8bit([parameter], block=(64, 64))
    (text,) = texts  # the same on all ranks
    assert "parameter layers.0.weight of shape (90, 50)" in text
    assert "rank 0 ends inside block 8 (elements 2048 to 2303)" in text
    assert "orig_param_policy=vescale.optim.adamw8bit_layout(block_size=256)" in text
    assert "plan.shard('layers.0.weight', RaggedShard(block=256), mesh='a', phase=INIT)" in text


def test_layout_policy() -> None:
    policy = adamw8bit_layout()
    assert policy("w", torch.empty(64, 64)) == 256 and policy("b", torch.empty(64)) is None
    tiles = adamw8bit_layout(block=(32, 2048))
    assert tiles("w", torch.empty(100, 64)) == 32 * 64 and tiles("e", torch.empty(8, 48, 64)) == 48 * 64
    assert tiles("v", torch.empty(5000)) == tiles("r", torch.empty(1, 5000)) == 2048
