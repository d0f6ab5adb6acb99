"""``torch.save``, ``torch.load(weights_only=True)``, pickling and copying of our placements and their DTensors."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from tests.device import device_type
from tests.fresh import run_fresh
from tests.ranks import RankPools
from vescale.compat import local_of, spec_of
from vescale.placements import InterleavedShard, RaggedShard, StridedRaggedShard, distribute_tensor

PLACEMENTS: list[Placement] = [
    RaggedShard(),
    RaggedShard((0, 1), (3, 0, 5)),
    RaggedShard(block=7),
    StridedRaggedShard((0,), (1, 2), split_factor=4),
    StridedRaggedShard(block=2, split_factor=2),
    InterleavedShard(-1, 3),
]
VALUE = torch.arange(12 * 8.0).reshape(12, 8)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements_survive_files_and_copies(placement: Placement) -> None:
    file = io.BytesIO()
    torch.save({"placement": placement}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["placement"]
    for other in (loaded, pickle.loads(pickle.dumps(placement)), copy.deepcopy(placement), copy.copy(placement)):
        assert type(other) is type(placement) and other == placement and hash(other) == hash(placement)
        assert other.is_shard() is False  # crashes the process when the C++ half is missing


def dtensors_in_files(folder: Path) -> None:
    mesh = init_device_mesh(device_type(), (2, 2))
    for number, placements in enumerate(
        [
            (Replicate(), RaggedShard((0, 1), (17, 79))),
            (StridedRaggedShard((0,), (0, 6), split_factor=2), Shard(0)),
            (InterleavedShard(0, 2), InterleavedShard(1, 3)),
        ]
    ):
        dtensor = distribute_tensor(VALUE, mesh, placements, src_data_rank=None)
        param = nn.Parameter(dtensor)
        file = folder / f"{number}.{dist.get_rank()}"
        torch.save({"dtensor": dtensor, "param": param}, file)
        loaded = torch.load(file, weights_only=True)
        copies = [loaded["dtensor"], loaded["param"], copy.deepcopy(dtensor), copy.deepcopy(param)]
        copies.append(pickle.loads(pickle.dumps(dtensor)))
        for other in copies:
            assert other.placements == spec_of(dtensor).placements and spec_of(other) == spec_of(dtensor)
            assert torch.equal(local_of(other), local_of(dtensor))
            assert local_of(other).data_ptr() != local_of(dtensor).data_ptr() or not local_of(dtensor).numel()
            assert torch.equal(other.full_tensor(), VALUE.to(device_type()))
        assert loaded["param"].requires_grad and isinstance(loaded["param"], nn.Parameter)


def test_dtensors_survive_files_and_copies(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(dtensors_in_files, tmp_path)


_FRESH = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import vescale.placements

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
state = torch.load(sys.argv[1], weights_only=True)
value = torch.arange(12 * 8.0).reshape(12, 8)
for name in ("ragged", "packed"):
    loaded = state[name]
    assert torch.equal(loaded.full_tensor(), value), name
    assert torch.equal(loaded.redistribute(placements=[vescale.placements.RaggedShard(block=5)]).full_tensor(), value)
print(state["placements"])
dist.destroy_process_group()
"""


def save_alone(file: Path) -> None:
    mesh = init_device_mesh(device_type(), (1,))
    ragged = distribute_tensor(VALUE, mesh, [RaggedShard((0, 1), (8,))])
    packed = distribute_tensor(VALUE, mesh, [InterleavedShard(0, 3)])
    hash(spec_of(ragged))  # a cached hash is of this process: it must not matter elsewhere
    torch.save({"ragged": ragged, "packed": packed, "placements": PLACEMENTS}, file)


def test_a_fresh_process_that_only_imports_placements_loads_dtensors(ranks: RankPools, tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    ranks.run(save_alone, file, world_size=1, device="cpu")  # which a process of its own has
    done = run_fresh(_FRESH, str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(PLACEMENTS)


def test_weights_only_still_refuses_other_classes(tmp_path: Path) -> None:
    torch.save({"placement": RaggedShard(), "path": tmp_path}, tmp_path / "mixed.pt")
    with pytest.raises(pickle.UnpicklingError, match=r"PosixPath|pathlib"):
        torch.load(tmp_path / "mixed.pt", weights_only=True)
