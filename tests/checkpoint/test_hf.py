"""Hugging Face's files: into models of every kind and back, compared with what transformers itself loads and saves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from tests.checkpoint.hf_models import build, reference, same_values, saved
from tests.device import device_type
from tests.plan_zoo.models import MODELS
from tests.ranks import RankPools
from tests.whole import whole_tensors
from vescale import parallelize, plan_zoo
from vescale.checkpoint import open_stored
from vescale.checkpoint._hf_export import export_hf
from vescale.checkpoint._hf_load import load_hf
from vescale.checkpoint._safetensors import open_safetensors
from vescale.checkpoint._verification import compare_stored
from vescale.errors import CheckpointError
from vescale.fsdp import fully_shard
from vescale.rng import deferred_init

pytest.importorskip("transformers")


def empty_model(name: str, kind: str) -> nn.Module:
    if kind == "meta":
        with torch.device("meta"):
            return MODELS[name].build()
    if kind == "deferred":
        with deferred_init():
            return MODELS[name].build()
    return MODELS[name].build()


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_on_one_device(name: str, tmp_path: Path) -> None:
    """Into plain, deferred and meta models as ``from_pretrained``, and back to the same names, shapes and dtypes."""
    MODELS[name].need()
    source = saved(name, tmp_path / "source")
    expected = reference(name, tmp_path / "source")
    for kind in ("plain", "deferred", "meta"):
        if (name, kind) == ("dit", "meta"):  # a table of positions that only the constructor can compute
            with pytest.raises(CheckpointError, match="deferred_init"):
                load_hf(empty_model(name, kind), tmp_path / "source")
            continue
        model = empty_model(name, kind)
        assert not load_hf(model, tmp_path / "source")
        assert same_values(model, expected) == []
    export_hf(model, tmp_path / "again", max_shard_size="50KB")
    one, two = (open_safetensors(tmp_path / folder).tensors for folder in ("source", "again"))
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {n: (t.shape, t.dtype) for n, t in two.items()}
    assert same_values(reference(name, tmp_path / "again"), source) == []


def _on_ranks(name: str, kind: str, folder: str) -> dict[str, torch.Tensor]:
    """Load sharded, return the whole tensors, and export."""
    model: Any
    if kind == "plan":
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        with deferred_init():
            model = MODELS[name].build()
        model = parallelize(model, plan_zoo.load(name, mesh))
    else:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("replica", "shard"))
        model = MODELS[name].build()
        fully_shard(model, mesh=mesh)
    tensors = dict(model.state_dict())
    before = {n: t.data_ptr() for n, t in tensors.items() if not hasattr(t, "device_mesh")}
    assert not load_hf(model, Path(folder) / "source")
    assert {n: tensors[n].data_ptr() for n in before} == before, "plain tensors are filled in place"
    written = export_hf(model, Path(folder) / kind, max_shard_size="60KB")
    found = {n: t.clone() for n, t in whole_tensors(dict(model.state_dict())).items()}
    assert sum(written) == _data_bytes(Path(folder) / kind)
    return {**found, "written": torch.tensor(written)}


def _data_bytes(folder: Path) -> int:
    tensors = open_safetensors(folder).tensors.values()
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


@pytest.mark.parametrize("kind", ["plan", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_models(name: str, kind: str, ranks: RankPools, tmp_path: Path) -> None:
    """On 2 x 2 ranks: the values of one device, and an export whose files are those of one device byte by byte."""
    MODELS[name].need()
    saved(name, tmp_path / "source")
    expected = reference(name, tmp_path / "source")
    export_hf(_filled(name, tmp_path / "source"), tmp_path / "one", max_shard_size="60KB")
    found = ranks.run(_on_ranks, name, kind, str(tmp_path), world_size=4)
    for values in found:
        written = values.pop("written").tolist()
        assert values.keys() == expected.state_dict().keys()
        assert [n for n, value in expected.state_dict().items() if not torch.equal(values[n], value)] == []
    assert max(written) <= 1.1 * sum(written) / len(written)
    assert same_values(reference(name, tmp_path / kind), expected) == []
    for path in (tmp_path / "one").glob("*.safetensors*"):
        assert path.read_bytes() == (tmp_path / kind / path.name).read_bytes(), path.name


def tiny(name: str) -> Any:
    """A model for whose class, or the class of a part of it, transformers prescribes names."""
    import transformers

    if name == "vit":
        vit = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
        )
        return transformers.ViTForImageClassification(vit)
    neox = transformers.GPTNeoXConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    return transformers.GPTNeoXForCausalLM(neox)


def sharded_by_class(name: str, folder: str) -> None:
    for kind, shard in (("ours", fully_shard), ("torch", torch_fully_shard)):
        model, mesh = tiny(name), init_device_mesh(device_type(), (2,))
        if name == "vit":
            shard(model.vit, mesh=mesh)
        shard(model, mesh=mesh)
        fresh = f"{folder}/{kind} fresh"
        export_hf(model, fresh)  # by what transformers prescribes for the class
        assert open_safetensors(Path(fresh)).tensors.keys() == open_safetensors(Path(folder, "source")).tensors.keys()
        assert not load_hf(model, f"{folder}/source")
        export_hf(model, f"{folder}/{kind}")


@pytest.mark.parametrize("name", ["gpt_neox", "vit"])
def test_names_that_depend_on_the_class(name: str, ranks: RankPools, tmp_path: Path) -> None:
    """``fully_shard`` puts a class of its own in front of the model's; transformers looks names up by the model's."""
    torch.manual_seed(3)
    tiny(name).save_pretrained(tmp_path / "source")
    ranks.run(sharded_by_class, name, str(tmp_path), world_size=2)
    for kind in ("ours", "torch"):
        found = open_stored(tmp_path / kind)
        assert not compare_stored(open_stored(tmp_path / "source"), found), kind
        config = json.loads((tmp_path / kind / "config.json").read_text())
        assert config["architectures"] == [type(tiny(name)).__name__]


def _filled(name: str, folder: Path) -> nn.Module:
    model = MODELS[name].build()
    load_hf(model, folder)
    return model


def test_tied_weights(tmp_path: Path) -> None:
    """Written once; loaded under either name; kept tied."""
    from safetensors.torch import load_file, save_file

    saved("gpt2", tmp_path / "a")
    names = open_safetensors(tmp_path / "a").tensors
    assert ("lm_head.weight" in names) != ("transformer.wte.weight" in names)
    for kind in ("plain", "deferred", "meta"):
        model: Any = empty_model("gpt2", kind)
        load_hf(model, tmp_path / "a")
        assert model.lm_head.weight is model.transformer.wte.weight
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, tmp_path / "a" / "model.safetensors", {"format": "pt"})
    other: Any = MODELS["gpt2"].build()
    load_hf(other, tmp_path / "a")
    assert torch.equal(other.transformer.wte.weight, tensors["lm_head.weight"])


def test_files_of_the_base_model(tmp_path: Path) -> None:
    """Without the prefix of the model with a head, as ``from_pretrained`` takes them; the head stays as it was made."""
    source: Any = build("llama")
    source.model.save_pretrained(tmp_path)
    model: Any = MODELS["llama"].build()
    head = model.lm_head.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: not in the checkpoint"):
        load_hf(model, tmp_path)
    left = load_hf(model, tmp_path, strict=False)
    assert list(left.missing) == ["lm_head.weight"]
    assert same_values(model.model, source.model) == []
    assert torch.equal(model.lm_head.weight, head)


def test_dtypes(tmp_path: Path) -> None:
    """Values are cast to what the model has; an export has the dtypes of the files that were loaded."""
    source: Any = build("llama").to(torch.bfloat16)
    source.save_pretrained(tmp_path / "a")
    model: Any = MODELS["llama"].build()
    load_hf(model, tmp_path / "a")
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, source.lm_head.weight.float())
    export_hf(model, tmp_path / "b")
    assert {tensor.dtype for tensor in open_safetensors(tmp_path / "b").tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"
    export_hf(model, tmp_path / "c", dtype=torch.float16)
    assert {tensor.dtype for tensor in open_safetensors(tmp_path / "c").tensors.values()} == {torch.float16}
    with deferred_init():
        deferred: Any = MODELS["llama"].build()
    load_hf(deferred, tmp_path / "a", dtype=torch.bfloat16)
    assert deferred.lm_head.weight.dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"is allocated in torch\.float32"):
        load_hf(model, tmp_path / "a", dtype=torch.bfloat16)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_projection.weight"] = tensors.pop("model.layers.0.self_attn.q_proj.weight")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, path, {"format": "pt"})
    model: Any = MODELS["llama"].build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as found:
        load_hf(model, tmp_path)
    text = str(found.value)
    assert (
        "model.layers.0.self_attn.q_proj.weight: not in the checkpoint (nearest: "
        "model.layers.0.self_attn.q_projection.weight" in text
    )
    assert "model.layers.0.self_attn.q_projection.weight: only in the checkpoint" in text
    assert "model.norm.weight: the checkpoint has shape (7,)" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "nothing was changed"
    left = load_hf(model, tmp_path, strict=False)
    assert list(left.missing) == ["model.layers.0.self_attn.q_proj.weight"]
    assert list(left.misshapen) == ["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, before["model.norm.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])


def test_what_an_export_leaves_and_replaces(tmp_path: Path) -> None:
    """Tokenizer files come along, older weights go, and nothing partial stays."""
    model = saved("llama", tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    (tmp_path / "a" / "secret.txt").write_text("mine")
    loaded = _filled("llama", tmp_path / "a")
    export_hf(loaded, tmp_path / "b", max_shard_size=20_000)
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) > 1
    export_hf(loaded, tmp_path / "b")
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert same_values(reference("llama", tmp_path / "b"), model) == []
    with pytest.raises(ValueError, match="max_shard_size"):
        export_hf(loaded, tmp_path / "c", max_shard_size="much")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        export_hf(loaded, tmp_path / "file")


class Phi(nn.Module):
    """Stands beside transformers' models: a module of the user's own, whose files have its names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("table", torch.arange(3.0), persistent=False)


def test_modules_of_other_kinds(tmp_path: Path) -> None:
    model = Phi()
    export_hf(model, tmp_path)
    with deferred_init():
        other = Phi()
    load_hf(other, tmp_path)
    assert torch.equal(other.linear.weight, model.linear.weight)
    assert torch.equal(other.table, model.table)
