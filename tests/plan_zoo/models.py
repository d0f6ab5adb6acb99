"""A tiny model, a batch and a float64 loss for every plan of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.runtime.hf import Objective

__all__ = ["MODELS", "ZooModel", "labels", "latents_of_classes", "latents_of_texts", "model_of", "tokens"]

_IGNORED = -100


@dataclass(frozen=True)
class ZooModel:
    """What a plan of the zoo is tried on; ``package`` has the model."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    objective: Objective
    package: str = "transformers"

    def need(self) -> None:
        pytest.importorskip(self.package)


def tokens(rows: int = 4, length: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randint(4, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


def labels(length: int = 8) -> torch.Tensor:
    """Many more ignored labels in the first half of the batch than in the second."""
    found = tokens(length=length, seed=2)
    found[:2, 3:] = _IGNORED
    return found


def _cross_entropy(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """In the logits' own precision, where transformers computes losses in float32."""
    logits = model(**inputs).logits
    wanted = labels(logits.shape[1]) if logits.ndim == 3 else torch.tensor([0, 3, 1, 2])
    return F.cross_entropy(logits.flatten(0, -2), wanted.reshape(-1), ignore_index=_IGNORED)


def _model(name: str, sizes: dict[str, Any], **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, name[: name.index("For") if "For" in name else name.index("LMHead")] + "Config")
        torch.manual_seed(0)
        return getattr(transformers, name)._from_config(config(**sizes), **settings)

    return build


_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
_EXPERTS = {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
_EAGER = {"experts_implementation": "eager"}  # float64 has no grouped kernel


def _causal(name: str, sizes: dict[str, Any], **settings: Any) -> ZooModel:
    return ZooModel(_model(name, sizes, **settings), lambda: {"input_ids": tokens()}, _cross_entropy)


_GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 4,
}
_T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
_WHISPER = {
    "vocab_size": 64,
    "d_model": 32,
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4))},
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
_LATENT = {
    **{key: value for key, value in _DECODER.items() if key != "head_dim"},
    "num_key_value_heads": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def _diffuser(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        shared = {"sample_size": 8, "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4}
        return getattr(diffusers, name)(**shared, **sizes)

    return build


def _diffusion(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """How well the model tells the noise, drawn here, from the latents; of eight channels half are variances."""
    latents, timestep = inputs["hidden_states"], inputs["timestep"]
    noise = torch.randn_like(latents)
    level = (timestep / 10).view(-1, 1, 1, 1).to(latents.dtype)
    found = model(**{**inputs, "hidden_states": (1 - level) * latents + level * noise}).sample
    if found.shape[1] == noise.shape[1]:
        return F.mse_loss(found, noise)
    mean, variance = found.chunk(2, dim=1)
    return F.mse_loss(mean, noise) + variance.square().mean() / 10


def _denoised(length: int = 8, texts: int = 6) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": torch.randn(4, 4, length, length, dtype=torch.float64),
        "timestep": torch.tensor([1, 5, 7, 9]),
        "encoder_hidden_states": torch.randn(4, texts, 24, dtype=torch.float64),
        "pooled_projections": torch.randn(4, 16, dtype=torch.float64),
        "class_labels": torch.tensor([1, 2, 3, 9]),
    }


def latents_of_classes(length: int = 8) -> dict[str, torch.Tensor]:
    found = _denoised(length)
    return {name: found[name] for name in ("hidden_states", "timestep", "class_labels")}


def latents_of_texts(length: int = 8, texts: int = 6) -> dict[str, torch.Tensor]:
    found = _denoised(length, texts)
    del found["class_labels"]
    return found


_SD3 = {"joint_attention_dim": 24, "caption_projection_dim": 32, "pooled_projection_dim": 16, "out_channels": 4}

MODELS: dict[str, ZooModel] = {
    "llama": _causal("LlamaForCausalLM", _DECODER),
    "llama_zero3": _causal("LlamaForCausalLM", _DECODER),
    "qwen3": _causal("Qwen3ForCausalLM", _DECODER),
    "gpt2": _causal("GPT2LMHeadModel", {**_GPT2, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}),
    "vit": ZooModel(
        _model("ViTForImageClassification", _VIT),
        lambda: {"pixel_values": torch.randn(4, 3, 16, 16, dtype=torch.float64)},
        _cross_entropy,
    ),
    "t5": ZooModel(
        _model("T5ForConditionalGeneration", _T5),
        lambda: {"input_ids": tokens(length=12), "labels": labels()},
        _cross_entropy,
    ),
    "whisper": ZooModel(
        _model("WhisperForConditionalGeneration", _WHISPER),
        lambda: {"input_features": torch.randn(4, 8, 32, dtype=torch.float64), "labels": labels()},
        _cross_entropy,
    ),
    "dit": ZooModel(
        _diffuser("DiTTransformer2DModel", num_layers=2, num_embeds_ada_norm=10, out_channels=8),
        latents_of_classes,
        _diffusion,
        "diffusers",
    ),
    # The first layer has attention of the images alone too, as in SD3.5; the last makes no text.
    "sd3": ZooModel(
        _diffuser(
            "SD3Transformer2DModel",
            num_layers=3,
            pos_embed_max_size=6,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
            **_SD3,
        ),
        latents_of_texts,
        _diffusion,
        "diffusers",
    ),
    "mixtral": _causal("MixtralForCausalLM", _EXPERTS, **_EAGER),
    "qwen3_moe": _causal(
        "Qwen3MoeForCausalLM",
        {**_DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **_EAGER,
    ),
    "gpt_oss": _causal("GptOssForCausalLM", _EXPERTS, **_EAGER),
    "deepseek_v3": _causal("DeepseekV3ForCausalLM", _LATENT, **_EAGER),
}


def model_of(plan: str) -> ZooModel:
    """The model that a plan of the zoo is for; plans for long sequences share theirs with the plan that they extend."""
    return MODELS[plan.removesuffix("_cp")]
