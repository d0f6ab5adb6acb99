"""``save_pretrained`` of a parallelized model: the folder that one device would write."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from tests.ranks import RankPools
from tests.runtime.hf import quiet
from tests.runtime.llama import make_mesh
from tests.runtime.test_generate import build
from vescale import parallelize, plan_zoo
from vescale.errors import ConsensusError
from vescale.placements import RaggedShard
from vescale.plans import Plan


def saved(kind: str, sizes: dict[str, int], folder: str, stock: str, shard: str) -> None:
    quiet()
    reference, model = build(kind), build(kind)
    if dist.get_rank() == 0:
        reference.save_pretrained(stock, max_shard_size=shard)
    mesh = make_mesh(**sizes)
    plan = plan_zoo.load(kind, mesh) if "tp" in sizes else zero(mesh)
    parallelize(model, plan)
    model.save_pretrained(folder, max_shard_size=shard)
    assert "state_dict" not in vars(model)
    # All ranks leave when the folder is complete.
    again = type(reference).from_pretrained(folder, dtype=reference.dtype)
    expected, found = reference.state_dict(), again.state_dict()
    assert set(expected) == set(found)
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def zero(mesh: Any) -> Plan:
    plan = Plan(mesh).shard("<in:input_ids>", Shard(0), mesh="dp")
    return plan.shard(".*", RaggedShard(), mesh="dp", phase="init").shard(".*", Replicate(), mesh="dp", phase="run")


CASES = [
    ("llama", {"dp": 1, "tp": 2}, "20KB"),
    ("gpt2", {"dp": 1, "tp": 2}, "5GB"),  # tied weights
    pytest.param("mixtral", {"dp": 1, "tp": 2}, "20KB", marks=pytest.mark.slow),  # merged experts
    pytest.param("t5", {"dp": 2, "tp": 2}, "20KB", marks=pytest.mark.slow),
    pytest.param("whisper", {"dp": 2, "tp": 2}, "20KB", marks=pytest.mark.slow),
    pytest.param("llama", {"dp": 2}, "20KB", marks=pytest.mark.slow),  # units
]


@pytest.mark.parametrize(("kind", "sizes", "shard"), CASES)
def test_folder_of_one_device(ranks: RankPools, tmp_path: Path, kind: str, sizes: dict[str, int], shard: str) -> None:
    """Files, index and values, as one device writes them."""
    quiet()
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    size = 1
    for number in sizes.values():
        size *= number
    ranks.run(saved, kind, sizes, str(ours), str(stock), shard, world_size=size)
    assert sorted(os.listdir(ours)) == sorted(os.listdir(stock))
    for name in os.listdir(stock):
        if name.endswith(".json"):
            assert json.loads((ours / name).read_text()) == json.loads((stock / name).read_text()), name
        else:
            assert (ours / name).read_bytes() == (stock / name).read_bytes(), name


def misused(folder: str) -> None:
    """One rank alone, two folders, and a file in the way: the same outcome on all ranks that are there; no hang."""
    quiet()
    model = build("llama")
    parallelize(model, plan_zoo.load("llama", make_mesh(dp=1, tp=2)))
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"ranks pass different folders.*on rank 1"):
        model.save_pretrained(f"{folder}/{rank}")
    if rank == 0:
        model.config.save_pretrained = None  # what fails on the rank that writes
    with pytest.raises(Exception, match="failed on rank 0, which writes: TypeError" if rank else "not callable"):
        model.save_pretrained(f"{folder}/all")
    os.environ["VESCALE_TIMEOUT"] = "1"
    try:
        if rank == 0:
            with pytest.raises(
                ConsensusError, match=r"every rank of the mesh must call it.*ranks \[1\] did not arrive"
            ):
                model.save_pretrained(f"{folder}/alone")
        dist.barrier()
        if rank == 1:  # a rank that comes late learns of it, and all ranks have counted this call
            with pytest.raises(ConsensusError, match=r"ranks \[1\] did not arrive"):
                model.save_pretrained(f"{folder}/alone")
    finally:
        del os.environ["VESCALE_TIMEOUT"]
    assert not os.path.exists(f"{folder}/alone")


def test_misuse(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(misused, str(tmp_path), world_size=2)
