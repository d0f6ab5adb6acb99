"""DCP save and load between placements, meshes and world sizes: bit-equal to what was saved."""

from __future__ import annotations

import copy
import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _create_default_local_metadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device import device_type
from tests.examples import NIGHTLY
from tests.ranks import RankPools, error_of
from vescale.comm import record_comms
from vescale.compat import local_of, make_dtensor, spec_of
from vescale.placements import (
    InterleavedShard,
    RaggedShard,
    StridedRaggedShard,
    distribute_tensor,
    from_local,
    has_custom,
    largest_shape,
    local_region,
    shard_dim,
)

# ---------------------------------------------------------------- random tensors and placements

NUM_KEYS = 24 if NIGHTLY else 12
MESHES = [(1,), (2,), (3,), (4,), (2, 2), (2, 2, 2)]
SHAPES = [(), (1,), (0, 3), (5, 0, 2), (7,), (13,), (6, 4), (5, 7), (9, 3), (4, 3, 5), (3, 5, 2), (2, 3, 4, 3)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.float64]


def source_of(key: int) -> torch.Tensor:
    """A global tensor in which every element is unique, up to bfloat16's integers."""
    shape, dtype = SHAPES[key % len(SHAPES)], DTYPES[key % len(DTYPES)]
    return (torch.arange(math.prod(shape)) + 1).reshape(shape).to(dtype)


def composition(rng: random.Random, total: int, parts: int) -> tuple[int, ...]:
    """Non-negative units with a sum, often zero, sometimes all on one rank."""
    if rng.random() < 0.2:
        owner = rng.randrange(parts)
        return tuple(total * (part == owner) for part in range(parts))
    cuts = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, total]))


def random_placements(rng: random.Random, shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> list[Placement]:
    def shard_like() -> Placement:
        if not shape or rng.random() < 0.25:
            return Replicate()
        dim = rng.randrange(len(shape))
        return InterleavedShard(dim, rng.randint(1, 4)) if rng.random() < 0.4 else Shard(dim)

    placements = [shard_like() for _ in mesh_shape]
    if rng.random() < 0.6:
        axis = rng.randrange(len(mesh_shape))
        others = placements[:axis] + placements[axis + 1 :]
        sizes = mesh_shape[:axis] + mesh_shape[axis + 1 :]
        held = largest_shape(shape, tuple(others), sizes)
        placements[axis] = random_ragged(rng, held, mesh_shape[axis], [d for p in others if (d := shard_dim(p))])
    return placements


def random_ragged(rng: random.Random, held: tuple[int, ...], num_ranks: int, inner: list[int]) -> RaggedShard:
    form = rng.randrange(4)
    if form == 0:
        return RaggedShard(block=rng.choice([None, 1, 2, 5]))
    if form == 1:
        block = rng.randint(1, 6)
        needed = -(-math.prod(held) // RaggedShard(block=block).granule(held, inner))
        return RaggedShard(local_units=composition(rng, needed, num_ranks), block=block)
    dims = tuple(range(rng.randint(0, len(held)))) if form == 2 else tuple(range(len(held)))
    rows, numel = math.prod(held[: len(dims)]), math.prod(held)
    uncut = math.prod(held[min(inner) :]) if inner else 1  # shares do not cut into a dim that another axis shards
    totals = [d for d in range(1, rows + 1) if rows % d == 0 and (numel == 0 or numel // d % uncut == 0)]
    return RaggedShard(dims, composition(rng, rng.choice(totals), num_ranks)) if totals else RaggedShard()


def random_state(seed: int, mesh: DeviceMesh, *, poisoned: bool = False) -> dict[str, torch.Tensor]:
    """Keys in random placements, some as plain tensors; ``poisoned``: without their values."""
    state: dict[str, torch.Tensor] = {}
    for key in range(NUM_KEYS):
        rng = random.Random(f"{seed} {key} {tuple(mesh.shape)}")
        source = source_of(key)
        value = torch.full_like(source, -1) if poisoned else source
        if rng.random() < 0.1:
            state[f"key{key}"] = value.clone()
        else:
            placements = random_placements(rng, tuple(source.shape), tuple(mesh.shape))
            state[f"key{key}"] = distribute_tensor(value, mesh, placements, src_data_rank=None)
    return state


def assert_holds_sources(state: dict[str, torch.Tensor], what: object) -> None:
    for name, value in state.items():
        source = source_of(int(name.removeprefix("key")))
        if not isinstance(value, DTensor):
            assert torch.equal(value, source), (what, name)
            continue
        mesh = value.device_mesh
        expected = distribute_tensor(source, mesh, value.placements, src_data_rank=None)
        assert value.dtype == source.dtype
        assert torch.equal(local_of(value), local_of(expected)), (what, name, value.placements, dist.get_rank())


def save_random(folder: Path, mesh_shapes: list[tuple[int, ...]]) -> None:
    for mesh_shape in mesh_shapes:
        state = random_state(0, init_device_mesh(device_type(), mesh_shape))
        dcp.save(state, checkpoint_id=str(folder / "x".join(map(str, mesh_shape))))


def load_random(folder: Path, mesh_shapes: list[tuple[int, ...]], seed: int) -> int:
    checkpoints = sorted(folder.iterdir())
    for mesh_shape in mesh_shapes:
        mesh = init_device_mesh(device_type(), mesh_shape)
        for number, checkpoint in enumerate(checkpoints):
            state = random_state(seed + number, mesh, poisoned=True)
            dcp.load(state, checkpoint_id=str(checkpoint))
            assert_holds_sources(state, (checkpoint.name, mesh_shape))
    return len(checkpoints)


def test_random_placements_between_all_meshes(ranks: RankPools, tmp_path: Path) -> None:
    by_world: dict[int, list[tuple[int, ...]]] = {}
    for mesh_shape in MESHES:
        by_world.setdefault(math.prod(mesh_shape), []).append(mesh_shape)
    for world_size, mesh_shapes in by_world.items():
        ranks.run(save_random, tmp_path, mesh_shapes, world_size=world_size)
    for world_size, mesh_shapes in by_world.items():
        loaded = ranks.run(load_random, tmp_path, mesh_shapes, 100, world_size=world_size)
        assert loaded == [len(MESHES)] * world_size
    for checkpoint in tmp_path.iterdir():
        assert_sound_metadata(checkpoint)


def assert_sound_metadata(checkpoint: Path) -> None:
    """Global sizes and dtypes; chunks that cover each tensor once; each chunk stored at a place of its own."""
    metadata = dcp.FileSystemReader(str(checkpoint)).read_metadata()
    assert len(metadata.state_dict_metadata) == NUM_KEYS
    places = set()
    for name, saved in metadata.state_dict_metadata.items():
        source = source_of(int(name.removeprefix("key")))
        assert saved.size == source.shape and saved.properties.dtype == source.dtype
        hits = torch.zeros_like(source, dtype=torch.int64)
        for chunk in saved.chunks:
            hits[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] += 1
        assert bool((hits == 1).all()), f"{name}: elements stored {hits.unique().tolist()} times"
    for index, info in metadata.storage_data.items():
        assert (info.relative_path, info.offset) not in places, index
        places.add((info.relative_path, info.offset))
    assert len(places) == sum(len(saved.chunks) for saved in metadata.state_dict_metadata.values())


# ---------------------------------------------------------------- every placement to every other, stock and plain

PAIRED = torch.arange(12 * 8).reshape(12, 8).float()
PLACEMENTS_2D: list[tuple[Placement, Placement]] = [
    (Replicate(), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (Replicate(), RaggedShard((0,), (5, 7))),
    (RaggedShard((0, 1), (0, 96)), Replicate()),
    (RaggedShard((), (0, 1)), Replicate()),
    (Shard(0), RaggedShard((0, 1), (29, 19))),
    (StridedRaggedShard((0,), (1, 5), split_factor=2), Shard(0)),
    (RaggedShard((0,), (5, 7)), Shard(1)),
    (InterleavedShard(0, 3), Replicate()),
    (InterleavedShard(1, 2), InterleavedShard(0, 2)),
    (InterleavedShard(0, 5), RaggedShard()),
    (_StridedShard(0, split_factor=3), RaggedShard(block=10)),
    (_StridedShard(0, split_factor=2), InterleavedShard(1, 2)),
]


def every_pair(folder: Path) -> int:
    mesh = init_device_mesh(device_type(), (2, 2))
    state: dict[str, Any] = {
        str(i): distribute_tensor(PAIRED + 1000 * i, mesh, placements) for i, placements in enumerate(PLACEMENTS_2D)
    }
    state["plain"] = PAIRED - 1000
    dcp.save(state, checkpoint_id=str(folder))
    for placements in [*PLACEMENTS_2D, None]:
        empty = torch.full_like(PAIRED, -1)
        # A clone each: a replicated DTensor shares memory with the tensor it is made of.
        target = {n: empty.clone() if placements is None else place(empty.clone(), mesh, placements) for n in state}
        before = {name: (value if placements is None else local_of(value)).data_ptr() for name, value in target.items()}
        dcp.load(target, checkpoint_id=str(folder))
        for name, value in target.items():
            source = PAIRED + (-1000 if name == "plain" else 1000 * int(name))
            expected = source if placements is None else local_of(place(source, mesh, placements))
            found = value if placements is None else local_of(value)
            assert torch.equal(found, expected), (name, placements)
            assert found.data_ptr() == before[name], "not loaded in place"
    return len(PLACEMENTS_2D)


def place(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def test_every_pair_of_placements_stock_and_plain(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks.run(every_pair, tmp_path) == [len(PLACEMENTS_2D)] * 4


# ---------------------------------------------------------------- what is written


def metadata_only(folder: Path) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    state = {
        name: value
        for seed in range(96 // NUM_KEYS)
        for name, value in (
            (f"{seed}.{key}", tensor) for key, tensor in random_state(seed, mesh).items() if isinstance(tensor, DTensor)
        )
        if has_custom(value.placements)
    }
    assert len(state) > 40
    dcp.save(state, checkpoint_id=str(folder))
    saved = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    planned = _create_default_local_metadata(state).state_dict_metadata
    assert planned.keys() == saved.keys()
    for name, found in planned.items():
        assert (found.size, found.properties.dtype) == (saved[name].size, saved[name].properties.dtype)
        assert blocks(found) == blocks(saved[name]), name
    stock = {"s": distribute_tensor(torch.ones(8), mesh, [Shard(0), Replicate()]), "p": torch.ones(3), "o": 7}
    mixed = _create_default_local_metadata(state | stock).state_dict_metadata
    assert [blocks(mixed["s"]), blocks(mixed["p"])] == [[((4 * (dist.get_rank() // 2),), (4,))], [((0,), (3,))]]


def blocks(saved: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks)


def test_metadata_only_plan_is_what_save_writes(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(metadata_only, tmp_path)


def save_replicated(folder: Path) -> int:
    mesh = init_device_mesh(device_type(), (2, 2))
    values = torch.arange(4096 * 4.0).reshape(4096, 4)
    state = {str(i): place(values + i, mesh, (Replicate(), RaggedShard((0,), (1000, 3096)))) for i in range(4)}
    dcp.save(state, checkpoint_id=str(folder))
    return sum(4 * math.prod(box.sizes) for v in state.values() for box in local_region_of(v).boxes)


def local_region_of(dtensor: DTensor) -> Any:
    coordinate = dtensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return local_region(dtensor.shape, dtensor.placements, tuple(dtensor.device_mesh.shape), coordinate)


def test_replicas_share_the_writing(ranks: RankPools, tmp_path: Path) -> None:
    held = ranks.run(save_replicated, tmp_path)
    written = [path.stat().st_size for path in sorted(tmp_path.glob("*.distcp"))]
    total = 4 * 4096 * 4 * 4
    assert sum(held) == 2 * total
    assert total <= sum(written) < 1.1 * total
    assert len(written) == 4 and all(size < 0.4 * total for size in written), written  # every replica writes a part


# ---------------------------------------------------------------- local tensors in larger buffers


def from_buffer(
    mesh: DeviceMesh, placements: tuple[Placement, ...], source: torch.Tensor, kind: str
) -> tuple[DTensor, torch.Tensor, torch.Tensor]:
    """A DTensor whose local tensor is a part of a large buffer; the buffer; a mask of that part."""
    part = local_of(place(source, mesh, placements))
    buffer = torch.full((200_000,), 7.0)
    where = torch.zeros_like(buffer, dtype=torch.bool)
    if kind == "slice":
        cut = lambda whole: whole[1000 : 1000 + part.numel()].view(part.shape)  # noqa: E731
    elif kind == "strided":  # every third element; the last dim steps over a gap
        cut = lambda whole: whole[500 : 500 + 3 * part.numel() : 3].view(part.shape)  # noqa: E731
    else:  # a transposed view: the first dim is the fast one
        cut = lambda whole: whole[64 : 64 + part.numel()].view(part.shape[::-1]).permute(*range(part.ndim)[::-1])  # noqa: E731
    cut(buffer).copy_(part)
    cut(where).fill_(True)
    whole = place(torch.zeros_like(source), mesh, placements)
    return make_dtensor(cut(buffer), spec_of(whole)), buffer, where


BUFFERED: list[tuple[tuple[Placement, ...], str]] = [
    ((RaggedShard((0,), (1, 0, 8, 3)),), "slice"),
    ((RaggedShard((0, 1), (13, 47, 0, 36)),), "slice"),
    ((RaggedShard((0, 1), (13, 47, 0, 36)),), "strided"),
    ((InterleavedShard(0, 3),), "slice"),
    ((InterleavedShard(1, 2),), "strided"),
    ((InterleavedShard(1, 2),), "transposed"),
]


def buffers(folder: Path) -> int:
    mesh = init_device_mesh(device_type(), (4,))
    state = {str(i): from_buffer(mesh, p, PAIRED + i, kind) for i, (p, kind) in enumerate(BUFFERED)}
    dcp.save({name: value for name, (value, _, _) in state.items()}, checkpoint_id=str(folder))
    plain = {str(i): torch.zeros_like(PAIRED) for i in range(len(BUFFERED))}
    dcp.load(plain, checkpoint_id=str(folder))
    for i in range(len(BUFFERED)):
        assert torch.equal(plain[str(i)], PAIRED + i), BUFFERED[i]
    target = {str(i): from_buffer(mesh, p, torch.full_like(PAIRED, -1), kind) for i, (p, kind) in enumerate(BUFFERED)}
    dcp.load({name: value for name, (value, _, _) in target.items()}, checkpoint_id=str(folder))
    for name, (value, buffer, where) in target.items():
        _, expected, _ = state[name]
        assert torch.equal(buffer, expected), (name, "the slice, or what lies around it, is wrong")
        assert int(where.sum()) == local_of(value).numel()
    return sum(local_of(value).numel() * 4 for value, _, _ in state.values())


def test_slices_of_buffers_are_written_alone_and_read_in_place(ranks: RankPools, tmp_path: Path) -> None:
    held = ranks.run(buffers, tmp_path)
    written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert sum(held) == len(BUFFERED) * PAIRED.numel() * 4
    num_chunks = len(dcp.FileSystemReader(str(tmp_path)).read_metadata().storage_data)
    assert written < sum(held) + 2500 * num_chunks, "a chunk's file has more than the chunk and its header"


# ---------------------------------------------------------------- memory and communication


class LargestAllocation(TorchDispatchMode):
    """The most bytes that any tensor of the local computation has behind it."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if type(tensor) is torch.Tensor and tensor.device.type == "cpu":
                self.num_bytes = max(self.num_bytes, tensor.untyped_storage().nbytes())
        return out


def spy_on_memory(folder: Path) -> list[float]:
    mesh = init_device_mesh(device_type(), (4,))
    source = torch.arange(1 << 16).reshape(256, 256).float()
    total = source.numel() * 4
    shares = []
    for number, (before, after) in enumerate(
        itertools.permutations(
            [
                RaggedShard((0, 1), (20000, 20000, 5536, 20000)),
                RaggedShard((0,), (64, 70, 60, 62)),
                InterleavedShard(0, 2),
                InterleavedShard(1, 4),
            ],
            2,
        )
    ):
        saved, loaded = place(source, mesh, (before,)), place(torch.zeros_like(source), mesh, (after,))
        with record_comms() as ledger, LargestAllocation() as spy:
            dcp.save({"w": saved}, checkpoint_id=str(folder / str(number)))
            dcp.load({"w": loaded}, checkpoint_id=str(folder / str(number)))
            dcp.async_save({"w": saved}, checkpoint_id=str(folder / f"{number}.async")).result()
            copy.deepcopy(saved)
        assert ledger.count() == 0, "a checkpoint of shards needs no tensor communication"
        shares.append(spy.num_bytes / total)
        assert torch.equal(local_of(loaded), local_of(place(source, mesh, (after,))))
    return shares


def test_sharded_save_load_and_copies_allocate_no_full_tensor(ranks: RankPools, tmp_path: Path) -> None:
    for shares in ranks.run(spy_on_memory, tmp_path):
        assert 0.0 < max(shares) < 0.35, shares


# ---------------------------------------------------------------- other entry points


def other_entry_points(folder: Path) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    placements = (InterleavedShard(0, 2), RaggedShard((0, 1), (17, 31)))
    source = place(PAIRED, mesh, placements)

    # Nested state dicts, and planners that cache their plans.
    for step in range(2):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        nested = {"model": {"w": source}, "steps": [step, source]}
        dcp.save(nested, checkpoint_id=str(folder / f"nested{step}"), planner=planner)
    target: dict[str, Any] = {"model": {"w": place(PAIRED * 0, mesh, placements)}, "steps": [-1, torch.zeros(12, 8)]}
    dcp.load(target, checkpoint_id=str(folder / "nested1"))
    assert torch.equal(local_of(target["model"]["w"]), local_of(source))
    assert target["steps"][0] == 1 and torch.equal(target["steps"][1], PAIRED.to(device_type()))

    # A DTensor on the meta device becomes a real one.
    meta = make_dtensor(local_of(source).to("meta"), spec_of(source))
    state: dict[str, Any] = {"model": {"w": meta}}
    dcp.load(state, checkpoint_id=str(folder / "nested1"))
    assert torch.equal(local_of(state["model"]["w"]), local_of(source))

    # A DTensor on a part of the ranks.
    few = DeviceMesh(device_type(), [1, 3])
    part = place(PAIRED, few, (RaggedShard((0, 1), (41, 55)),))
    dcp.save({"w": part}, checkpoint_id=str(folder / "part"))
    other = place(PAIRED * 0, DeviceMesh(device_type(), [2, 0]), (InterleavedShard(1, 2),))
    dcp.load({"w": other}, checkpoint_id=str(folder / "part"))
    if other.device_mesh.get_coordinate() is not None:
        assert torch.equal(local_of(other), local_of(place(PAIRED, other.device_mesh, other.placements)))
    else:
        assert local_of(other).numel() == 0

    # Asynchronous: what counts is the value when async_save returns.
    moving = place(PAIRED, mesh, placements)
    for name, options in (("staged", {}), ("writer", {"storage_writer": dcp.FileSystemWriter(str(folder / "writer"))})):
        local_of(moving).copy_(local_of(source))
        pending = dcp.async_save({"w": moving}, checkpoint_id=str(folder / name), **options)
        local_of(moving).fill_(-3)
        pending.result()
        back = torch.zeros_like(PAIRED)
        dcp.load({"w": back}, checkpoint_id=str(folder / name))
        assert torch.equal(back, PAIRED), name

    # The result of an asynchronous redistribution, before anyone waited for it.
    lazy = source.redistribute(placements=[Replicate(), RaggedShard()], async_op=True)
    dcp.save({"w": lazy}, checkpoint_id=str(folder / "lazy"))
    back = torch.zeros_like(PAIRED)
    dcp.load({"w": back}, checkpoint_id=str(folder / "lazy"))
    assert torch.equal(back, PAIRED)


def test_other_entry_points(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(other_entry_points, tmp_path)


def test_load_in_a_single_process_without_process_group(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(save_replicated, tmp_path)
    back = torch.zeros(4096, 4)
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"2": back}, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(back, torch.arange(4096 * 4.0).reshape(4096, 4) + 2)


# ---------------------------------------------------------------- errors


def save_one(folder: Path) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    state = {"block.weight": place(PAIRED, mesh, (RaggedShard((0,), (5, 7)),)), "note": "text"}
    dcp.save(state, checkpoint_id=str(folder))


def load_wrong(folder: Path, case: str) -> None:
    mesh = init_device_mesh(device_type(), (2,))
    if case == "shape":
        state = {"block.weight": place(torch.zeros(8, 12), mesh, (RaggedShard((0,), (3, 5)),))}
    elif case == "bytes":
        state = {"note": place(torch.zeros(8, 12), mesh, (InterleavedShard(0, 2),))}
    else:
        wrong = place(PAIRED, mesh, (RaggedShard((0,), (5, 7)),))
        state = {"block.weight": make_dtensor(local_of(wrong)[:7], spec_of(wrong))}
    dcp.load(state, checkpoint_id=str(folder))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("shape", ["block.weight", r"\(12, 8\)", r"\(8, 12\)", "RaggedShard", "build the model"]),
        ("bytes", ["note", "not a tensor", r"\(8, 12\)", "InterleavedShard", "that was saved"]),
        ("local", ["block.weight", r"\(40,\)|\(56,\)", r"\(7,\)", "RaggedShard", "from_local"]),
    ],
)
def test_load_errors_name_tensor_shapes_placements_and_the_fix(
    ranks: RankPools, tmp_path: Path, case: str, parts: list[str]
) -> None:
    ranks.run(save_one, tmp_path, world_size=2)
    text = "".join(ranks.run(error_of, load_wrong, tmp_path, case, world_size=2))
    for part in parts:
        assert any(option in text for option in part.replace("\\", "").split("|")), (part, text)


def save_wrong(folder: Path, case: str) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    if case == "partial":
        local = torch.ones(12 if mesh.get_local_rank(1) == 0 else 84)
        value = from_local(local, mesh, [Partial(), RaggedShard((0, 1), (12, 84))], shape=(12, 8))
        dcp.save({"block.weight": value}, checkpoint_id=str(folder))
    elif case == "local":
        whole = place(PAIRED, mesh, (Replicate(), RaggedShard((0,), (5, 7))))
        local = local_of(whole)[:7] if dist.get_rank() == 2 else local_of(whole)  # one rank alone is wrong
        dcp.save({"block.weight": make_dtensor(local, spec_of(whole))}, checkpoint_id=str(folder))
    else:
        value = place(PAIRED, mesh, (Replicate(), InterleavedShard(0, 3)))
        writer = dcp.HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
        dcp.save({"block.weight": value}, storage_writer=writer)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("partial", ["block.weight", "(12, 8)", "pending reduction", "redistribute it"]),
        ("local", ["block.weight", "(40,)", "(7,)", "from_local"]),
        ("safetensors", ["block.weight", "one block", "would be lost", "FileSystemWriter"]),
    ],
)
def test_save_errors_come_before_anything_is_written(
    ranks: RankPools, tmp_path: Path, case: str, parts: list[str]
) -> None:
    text = "".join(ranks.run(error_of, save_wrong, tmp_path, case))
    for part in parts:
        assert part in text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
