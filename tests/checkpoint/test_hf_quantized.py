"""fp8 and MXFP4 checkpoints against one-page dequantization of whole tensors, and against transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.hf_models import same_values, saved
from tests.device import device_type
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import parallelize, plan_zoo
from vescale.checkpoint._hf_export import export_hf
from vescale.checkpoint._hf_load import load_hf
from vescale.checkpoint._safetensors import open_safetensors
from vescale.errors import CheckpointError
from vescale.fsdp import fully_shard
from vescale.rng import deferred_init

pytest.importorskip("transformers")

BLOCK = (16, 8)  # of a small model; 128 x 128 in real ones


def fp8_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A DeepSeek checkpoint whose matrices are fp8 in blocks, the last of each row and column partial; its values."""
    from safetensors.torch import load_file, save_file

    saved("deepseek_v3", folder)
    path = folder / "model.safetensors"
    tensors, values = load_file(path), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        values[name] = tensor
        if tensor.ndim == 2 and "proj" in name:
            rows, columns = tensor.shape
            grid = (-(-rows // BLOCK[0]), -(-columns // BLOCK[1]))
            scales = torch.rand(grid, generator=generator) + 0.5
            packed = tensor.to(torch.float8_e4m3fn)
            wide = scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)[:rows, :columns]
            values[name] = packed.float() * wide
            tensors[name], tensors[f"{name}_scale_inv"] = packed, scales
    assert any(t.shape[0] % BLOCK[0] for n, t in tensors.items() if t.dtype == torch.float8_e4m3fn)
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def mxfp4_folder(folder: Path) -> dict[str, torch.Tensor]:
    """A gpt-oss checkpoint with packed experts; the values of its experts, by transformers."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    saved("gpt_oss", folder)
    path = folder / "model.safetensors"
    tensors, values = load_file(path), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in list(tensors.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del tensors[name]
            experts, inputs, outputs = tensor.shape
            packed = (experts, outputs, -(-inputs // 32), 16)
            if inputs % 32:
                packed = (experts, outputs, inputs // 16, 8)  # narrower groups, for a small model
            blocks = torch.randint(0, 256, packed, dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 134, packed[:-1], dtype=torch.uint8, generator=generator)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            assert values[name].shape == tensor.shape
    save_file(tensors, path, {"format": "pt"})
    return values


def expected_of(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """What a model has to hold: the folder with values in the place of quantized tensors, loaded by transformers."""
    from safetensors.torch import load_file, save_file

    values = (fp8_folder if name == "deepseek_v3" else mxfp4_folder)(folder / "quantized")
    plain = folder / "plain"
    plain.mkdir()
    tensors = load_file(folder / "quantized" / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if not n.endswith(("_scale_inv", "_blocks", "_scales"))}
    save_file({**kept, **{n: v.contiguous() for n, v in values.items()}}, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "quantized" / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    model: Any = type(MODELS[name].build())
    return dict(model.from_pretrained(plain).state_dict())


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_one_device(name: str, tmp_path: Path) -> None:
    expected = expected_of(name, tmp_path)
    with deferred_init():
        model: Any = MODELS[name].build()
    assert not load_hf(model, tmp_path / "quantized")
    assert [n for n, value in model.state_dict().items() if not torch.equal(value, expected[n])] == []
    export_hf(model, tmp_path / "again")
    found = open_safetensors(tmp_path / "again").tensors
    assert not any(n.endswith(("_scale_inv", "_blocks", "_scales")) for n in found)
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    again = type(model).from_pretrained(tmp_path / "again")
    assert same_values(again, model) == []


def _sharded(name: str, kind: str, folder: str) -> dict[str, Any]:
    model: Any = MODELS[name].build()
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",)))
    else:
        mesh = init_device_mesh(device_type(), (1, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize(model, plan_zoo.load(name, mesh))
    load_hf(model, folder)
    return {n: t.clone() for n, t in whole_tensors(dict(model.state_dict())).items() if t is not None}


@pytest.mark.parametrize("kind", ["fsdp", "plan"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_sharded(name: str, kind: str, ranks: RankPools, tmp_path: Path) -> None:
    expected = expected_of(name, tmp_path)
    for found in ranks.run(_sharded, name, kind, str(tmp_path / "quantized"), world_size=2):
        assert [n for n, value in found.items() if not torch.equal(value, expected[n])] == []


def test_blocks_smaller_than_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that begin and end inside of the blocks that share a scale."""
    from vescale.checkpoint import _hf_load

    for name in ("deepseek_v3", "gpt_oss"):
        (tmp_path / name).mkdir()
        expected = expected_of(name, tmp_path / name)
        monkeypatch.setattr(_hf_load, "_MAX_ELEMENTS", 37)
        model: Any = MODELS[name].build()
        load_hf(model, tmp_path / name / "quantized")
        assert [n for n, value in model.state_dict().items() if not torch.equal(value, expected[n])] == []


def test_scales_that_do_not_fit(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    fp8_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[name] = torch.ones(3, 97)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has scales of shape \(3, 97\)"):
        load_hf(MODELS["deepseek_v3"].build(), tmp_path)
