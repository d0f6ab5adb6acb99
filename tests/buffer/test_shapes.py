"""The shape lists of real models, and units."""

from __future__ import annotations

import math

import pytest

from tests.model_shapes import group_units, shape_list, shape_list_names

# total parameters and layers of the models, as published
MODELS = {
    "deepseek-v3": (671e9, 61),
    "deepseek-v3-per-expert": (671e9, 61),
    "gpt-oss-120b": (116.8e9, 36),
    "gpt-oss-120b-out-in": (116.8e9, 36),
    "gpt-oss-120b-per-expert": (116.8e9, 36),
    "llama-3-405b": (405.9e9, 126),
    "llama-3-70b": (70.6e9, 80),
    "mixtral-8x7b": (46.7e9, 32),
    "mixtral-8x7b-per-expert": (46.7e9, 32),
    "qwen3-30b-a3b": (30.5e9, 48),
    "qwen3-30b-a3b-per-expert": (30.5e9, 48),
}


def test_all_lists_are_known() -> None:
    assert set(shape_list_names()) == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_lists_are_the_models(name: str) -> None:
    model = shape_list(name)
    total = sum(unit.count * sum(math.prod(shape) for _, shape in unit.parameters) for unit in model.units)
    assert total == pytest.approx(MODELS[name][0], rel=2e-3)
    assert sum(unit.count for unit in model.units if unit.path != "(root)") == MODELS[name][1]


def test_lists_are_what_transformers_builds() -> None:
    """One list against a fresh meta model; the tool that built all of them takes longer."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shape_list("llama-3-70b").units == group_units(shapes)


def test_units_are_the_repeated_blocks() -> None:
    units = group_units(
        {
            "embed.weight": (8, 4),
            "layers.0.a": (4, 4),
            "layers.0.experts.0.w": (2,),
            "layers.1.a": (4, 4),
            "layers.1.experts.0.w": (2,),
            "layers.2.a": (4, 5),
            "norm": (4,),
        }
    )
    assert [(unit.path, unit.count, list(unit.shapes)) for unit in units] == [
        ("(root)", 1, ["embed.weight", "norm"]),
        ("layers.0", 2, ["a", "experts.0.w"]),
        ("layers.2", 1, ["a"]),
    ]
