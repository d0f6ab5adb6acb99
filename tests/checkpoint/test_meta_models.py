"""Models that are built without values, by every recipe that errors and pages name: the numbers of one device, or an error
that names what has no values."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.checkpoint.hf_models import reference, saved
from tests.device import device_type
from tests.examples import daily_sample
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.whole import whole
from vescale import Plan, deferred_init, parallelize
from vescale.checkpoint import load, load_hf, save
from vescale.errors import ContentMismatchError, MissingValuesError
from vescale.fsdp import fully_shard
from vescale.placements import distribute_tensor

WAYS = ("fully_shard", "torch", "plan")
RECIPES = ("meta", "to_empty", "deferred")
CASES = [(name, way, how) for name in MODELS for way in WAYS for how in RECIPES]


def cut(model: nn.Module, way: str) -> nn.Module:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    if way == "plan":
        return parallelize(model, Plan(mesh))
    shard: Any = fully_shard if way == "fully_shard" else torch_fully_shard
    inner: set[nn.Module] = set()
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList) and module not in inner and way == "fully_shard":
            for child in module:
                inner |= {*child.modules()}
                shard(child, mesh=mesh)
    return shard(model, mesh=mesh)


def hf_recipe(folder: str, name: str, way: str, how: str) -> None:
    """``load_hf`` of a folder, with memory that it gives itself or that ``to_empty`` has given."""
    expected = reference(name, Path(folder)).to(device_type())  # diffusers loads to the CPU
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with deferred_init() if how == "deferred" else torch.device("meta"):
            model = MODELS[name].build()
        model = cut(model, way)
        if how == "to_empty":
            model.to_empty(device=device_type())
        if (name, how) == ("dit", "deferred") or name != "dit":
            assert not load_hf(model, folder)
        else:  # a table of positions that only the constructor can compute
            with pytest.raises(ContentMismatchError, match=r"deferred_init"):
                load_hf(model, folder)
            return
    found = {**dict(model.named_buffers()), **model.state_dict()}
    for key, value in {**dict(expected.named_buffers()), **expected.state_dict()}.items():
        assert torch.equal(whole(found[key]), value), (key, whole(found[key]), value)


@pytest.mark.parametrize(
    ("name", "way", "how"),
    # PyTorch's fully_shard knows no deferred tensors, nor what to_empty has left without values.
    daily_sample([case for case in CASES if case[1] != "torch" or case[2] == "meta"], 8),
)
def test_recipes_of_load_hf(ranks: RankPools, tmp_path: Path, name: str, way: str, how: str) -> None:
    pytest.importorskip("transformers")
    MODELS[name].need()
    saved(name, tmp_path)
    ranks.run(hf_recipe, str(tmp_path), name, way, how, world_size=2)


class Tables(nn.Module):
    """With buffers of several dtypes that are in no state dict, also in a part."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.part = nn.Module()
        table = torch.arange(4).to(dtype)
        self.part.register_buffer("table", table, persistent=False)
        self.register_buffer("kept", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table: Any = self.part.table
        table = torch.view_as_real(table).sum(-1) if table.is_complex() else table
        return self.up(x * table.float()) + self.kept.sum()


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.complex64)


def own_recipe(folder: str, way: str) -> None:
    """``to_empty`` and values from elsewhere: the first forward tells of what is left by its name, until it is written."""
    for number, dtype in enumerate(DTYPES):
        torch.manual_seed(0)
        expected = Tables(dtype)
        x = torch.randn(4, 4)
        save(f"{folder}/{number}", model=expected)
        for fill in ("load", "load_state_dict", "assign", "init", "nothing"):
            torch.manual_seed(0)
            with torch.device("meta"), warnings.catch_warnings():
                model: Any = Tables(dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = cut(model, way)
            model.to_empty(device=device_type())
            state = {
                key: distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
                if hasattr(own := model.state_dict()[key], "placements")
                else value.clone()
                for key, value in expected.state_dict().items()
            }
            if fill == "load":
                load(f"{folder}/{number}", model=model)
            elif fill == "init":
                with torch.no_grad():
                    for tensor in (*model.parameters(), model.kept):
                        tensor.fill_(0)
            elif fill != "nothing":
                model.load_state_dict(state, assign=fill == "assign")
            left = r"(?:up|kept).*table" if fill == "nothing" else r"^part\.table of this"
            with pytest.raises(MissingValuesError, match=left):
                model(x)
            if fill == "nothing":
                continue
            with torch.no_grad():
                model.part.table.copy_(expected.part.table)
            found = model(x)
            if fill != "init":
                assert torch.allclose(whole(found), expected(x), atol=1e-6), (way, dtype, fill)


def test_what_never_got_a_value(ranks: RankPools, tmp_path: Path) -> None:
    for way in ("fully_shard", "plan"):
        ranks.run(own_recipe, str(tmp_path / way), way, world_size=2)
