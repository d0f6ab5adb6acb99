"""``load_hf`` of a model that PEFT has adapted: weights of the model inside, adapters as their constructor made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vescale.checkpoint import CheckpointError, export_hf, load_hf
from vescale.rng import deferred_init, materialize

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def llama() -> Any:
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=2))


def adapted(model: Any, **options: Any) -> Any:
    targets = ["q_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    llama().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_weights_are_loaded_and_adapters_kept(folder: Path, is_deferred: bool, inside: bool, tmp_path: Path) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    torch.manual_seed(2)
    reference = adapted(llama()).state_dict()
    torch.manual_seed(2)
    if is_deferred:
        with deferred_init():
            model = adapted(llama())
    else:
        model = adapted(llama())
    found = load_hf(model.get_base_model() if inside else model, folder)
    assert not (found.missing or found.surplus or found.misshapen)
    materialize(model)
    num_adapters = 0
    for name, value in model.state_dict().items():
        plain = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if "lora_" in name:
            assert torch.equal(value, reference[name]), name
            num_adapters += 1
        else:
            assert torch.equal(value, expected[plain]), name
    assert num_adapters == 8
    export_hf(model.merge_and_unload(), tmp_path / "merged")
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    name, other = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    assert not torch.equal(merged[name], expected[name]) and torch.equal(merged[other], expected[other])


def test_copies_that_peft_trains_are_refused(folder: Path) -> None:
    model = adapted(llama(), modules_to_save=["lm_head"])
    with pytest.raises(
        CheckpointError, match=r"lm_head\.modules_to_save\.default\.weight is PEFT's copy.*load the weights"
    ):
        load_hf(model, folder)


def test_what_does_not_fit_is_told_by_the_names_of_files(folder: Path) -> None:
    model = adapted(llama())
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer = torch.nn.Linear(8, 6)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight"):
        load_hf(model, folder)
