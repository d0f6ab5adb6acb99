"""Averages of a model's parameters onto other meshes, stages and wrappers: filled by name, whichever rank has saved what."""

from __future__ import annotations

import math
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.pipeline.steps import Net, mesh_of
from tests.ranks import RankPools
from tests.whole import whole
from vescale import parallelize
from vescale.checkpoint import CheckpointWarning, load, save
from vescale.errors import ContentMismatchError
from vescale.optim import EMA
from vescale.plans import Plan

UPDATES = 3


def model_on(sizes: dict[str, int]) -> nn.Module:
    torch.manual_seed(0)
    net = Net(tied=True, dropout=0.0).double()
    if not sizes:
        return net
    plan = Plan(mesh_of(**sizes))
    if "pp" in sizes:
        plan.pipeline(split_before=["blocks.2"], microbatches=2, loss="out.loss")
    return parallelize(net, plan)


def average_of(name: str, shape: torch.Size) -> torch.Tensor:
    """Tied parameters have one."""
    name = "embed.weight" if name == "head.weight" else name
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def saved(sizes: dict[str, int], folder: str) -> None:
    model = model_on(sizes)
    ema = EMA(model, 0.5)
    state = ema.state_dict()
    averages = {name: average_of(name, average.shape) for name, average in state["averages"].items()}
    ema.load_state_dict({"decay": 0.5, "num_updates": UPDATES, "averages": averages})
    save(folder, model=model, ema=ema)


def loaded(sizes: dict[str, int], folder: str) -> int:
    model = model_on(sizes)
    ema = EMA(model, 0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        load(folder, model=model, ema=ema, rng=False)
    assert (ema.decay, ema.num_updates) == (0.5, UPDATES)
    averages = ema.state_dict()["averages"]
    assert averages.keys() == dict(model.named_parameters()).keys()
    for name, average in averages.items():
        assert torch.equal(whole(average), average_of(name, average.shape)), name
    return len(averages)


@pytest.mark.parametrize("source", [{"pp": 2}, {"dp": 2}, {}], ids=["stages", "ranks", "one"])
def test_stages_and_meshes(ranks: RankPools, tmp_path: Path, source: dict[str, int]) -> None:
    """As many ranks as have saved it, each of which had other averages, and fewer; tied parameters of two stages."""
    folder = str(tmp_path / "one")
    ranks.run(saved, source, folder, world_size=math.prod(source.values()))
    for target, expected in (({"pp": 2}, [14, 15]), ({"dp": 2}, [28, 28]), ({}, [28])):
        assert ranks.run(loaded, target, folder, world_size=math.prod(target.values())) == expected


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(3))


def wrapped(folder: str) -> None:
    """Wrappers leave no trace in the names of averages; those of another model are an error, also where they are sharded."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made: list[Any] = [DistributedDataParallel(plain), torch.compile(plain), plain]
    names = [EMA(model).state_dict()["averages"].keys() for model in made]
    assert names[0] == names[1] == names[2] == dict(plain.named_parameters()).keys()
    sharded = parallelize(plain, Plan(mesh_of(dp=2)))
    save(folder, ema=EMA(sharded))
    with pytest.raises(ContentMismatchError, match=r"ema\.averages\.0\.weight: only in the checkpoint"):
        load(folder, ema=EMA(Other()))
    other = EMA(Other())
    found = load(folder, ema=other, strict=False)
    assert found["not_loaded"]["surplus"] == [f"ema.averages.{name}" for name in sorted(names[2])]
    assert "ema" not in found and dist.get_world_size() == 2


def test_names_of_wrapped_and_other_models(ranks: RankPools, tmp_path: Path) -> None:
    ranks.run(wrapped, str(tmp_path / "one"), world_size=2)
