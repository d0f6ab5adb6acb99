"""Every class of transformers with a plan of its own: files of ``save_pretrained`` in, and out again, sharded or not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.device import device_type
from tests.plans.tiny_hf import planned_config, planned_configs, tiny_model
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale.checkpoint import export_hf, load_hf, open_stored
from vescale.checkpoint._verification import compare_stored
from vescale.fsdp import fully_shard
from vescale.rng import deferred_init

pytest.importorskip("transformers")

CLASS_SPECIFIC = ("gpt_neox:GPTNeoXConfig", "ultrabert:UltrabertConfig", "unlimited_ocr:UnlimitedOcrTextConfig")


def models(names: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Those that the rules on names of sizes can build, with numbers of their own everywhere."""
    for name in names or sorted(planned_configs()):
        try:
            model = tiny_model(planned_config(name))
        except Exception:  # sizes that do not fit together
            continue
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for tensor in model.state_dict().values():
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator))
        yield name, model


def different(a: nn.Module, b: nn.Module) -> list[str]:
    one, two = a.state_dict(), whole_tensors(dict(b.state_dict()))
    return [name for name in one if name not in two or not torch.equal(one[name], two[name])]


def exported_otherwise(name: str, model: Any, folder: Path) -> list[str]:
    """Whether an export into ``b`` is another checkpoint than what transformers has saved in ``a``."""
    export_hf(model, folder / "b", max_shard_size="60KB")
    return [f"{name}: export"] * bool(compare_stored(open_stored(folder / "a"), open_stored(folder / "b")))


@pytest.mark.slow
def test_every_class(tmp_path: Path) -> None:
    wrong, count = [], 0
    for name, source in models():
        source.save_pretrained(tmp_path / "a")
        kind = planned_config(name)
        for how in ("plain", "deferred", "meta"):
            with deferred_init() if how == "deferred" else torch.device("meta" if how == "meta" else device_type()):
                model = tiny_model(kind, meta=how == "meta")
            load_hf(model, tmp_path / "a")
            wrong += [f"{name}, {how}: {each}" for each in different(source, model)]
        wrong += exported_otherwise(name, model, tmp_path)
        count += 1
        shutil.rmtree(tmp_path / "a")
        shutil.rmtree(tmp_path / "b")
    assert not wrong and count > 100, (count, wrong)


def sharded(folder: str, names: tuple[str, ...]) -> tuple[int, list[str]]:
    wrong, count = [], 0
    for name, source in models(names):
        place = Path(folder, name.replace(":", " "))
        if dist.get_rank() == 0:
            source.save_pretrained(place / "a")
        dist.barrier()
        model: Any = tiny_model(planned_config(name))
        fully_shard(model, mesh=init_device_mesh(device_type(), (dist.get_world_size(),)))
        load_hf(model, place / "a")
        wrong += [f"{name}: {each}" for each in different(source, model)]
        wrong += exported_otherwise(name, model, place)
        count += 1
    return count, wrong


@pytest.mark.slow
@pytest.mark.parametrize("names", [CLASS_SPECIFIC, ()], ids=["of classes", "all"])
def test_every_class_sharded(names: tuple[str, ...], ranks: RankPools, tmp_path: Path) -> None:
    """``fully_shard`` on the whole model, whose class then is another one."""
    for count, wrong in ranks.run(sharded, str(tmp_path), names, world_size=3):
        assert not wrong and count >= (len(names) or 100), (count, wrong)
