"""Build the shape lists of ``vescale/buffer/shapes`` from Hugging Face configurations, on the meta device.

    python tools/build_shapes.py

The sizes of each model are written out here (they are those of its public config.json); every parameter name and shape
comes from the transformers model class. ``-per-expert`` lists split the fused expert weights into one matrix for each
expert, which is how these models are stored in checkpoints and how the veScale-FSDP paper counts DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.model_shapes import ModelShapes, Unit, group_units

FOLDER = Path(__file__).parent.parent / "tests" / "model_shapes"

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": (
        "DeepseekV3Config",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
    ),
    "gpt-oss-120b": (
        "GptOssConfig",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_local_experts": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "llama-3-70b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "llama-3-405b": (
        "LlamaConfig",
        {
            "vocab_size": 128256,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_experts": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "mixtral-8x7b": (
        "MixtralConfig",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_local_experts": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
}

Parameter = tuple[str, tuple[int, ...]]


def split_experts(parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Fused [experts, out, in] weights as one matrix for each expert, gate, up and down of an expert in a row."""
    shapes = dict(parameters)
    for name, shape in parameters:
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            experts, both, width = shape
            for expert in range(experts):
                yield f"{prefix}{expert}.gate_proj.weight", (both // 2, width)
                yield f"{prefix}{expert}.up_proj.weight", (both // 2, width)
                yield f"{prefix}{expert}.down_proj.weight", shapes[f"{prefix}down_proj"][1:]
        elif not name.endswith("experts.down_proj"):
            yield name, shape


def split_experts_gptoss(parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """GPT-OSS keeps gate and up interleaved in one [in, out] matrix, and its biases fused."""
    shapes = dict(parameters)
    for name, shape in parameters:
        if name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            for expert in range(shape[0]):
                yield f"{prefix}{expert}.gate_up_proj", shape[1:]
                yield f"{prefix}{expert}.down_proj", shapes[f"{prefix}down_proj"][1:]
        elif not name.endswith("experts.down_proj"):
            yield name, shape


def transposed_experts(parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
    """Expert weights stored [experts, out, in]: rows are half as long where out is twice in."""
    for name, shape in parameters:
        fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        yield name, (shape[0], shape[2], shape[1]) if fused else shape


VARIANTS = {
    "deepseek-v3-per-expert": ("deepseek-v3", split_experts),
    "qwen3-30b-a3b-per-expert": ("qwen3-30b-a3b", split_experts),
    "mixtral-8x7b-per-expert": ("mixtral-8x7b", split_experts),
    "gpt-oss-120b-per-expert": ("gpt-oss-120b", split_experts_gptoss),
    "gpt-oss-120b-out-in": ("gpt-oss-120b", transposed_experts),
}


def from_config(name: str) -> ModelShapes:
    config_name, sizes = MODELS[name]
    config = getattr(transformers, config_name)(**sizes, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shapes = {parameter: tuple(value.shape) for parameter, value in model.named_parameters()}
    return ModelShapes(name, f"transformers.{config_name}", group_units(shapes))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    models = {name: from_config(name) for name in MODELS}
    for name, (base, transform) in VARIANTS.items():
        units = tuple(Unit(u.path, u.count, tuple(transform(u.parameters))) for u in models[base].units)
        models[name] = ModelShapes(name, f"{models[base].source}, {transform.__name__}", units)
    for name, model in models.items():
        (FOLDER / f"{name}.json").write_text(model.to_json(), encoding="utf-8")
        print(f"{name}: {[(unit.path, unit.count, len(unit.parameters)) for unit in model.units]}")


if __name__ == "__main__":
    main()
