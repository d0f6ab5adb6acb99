"""Tiny Hugging Face models of every configuration class that ships a tensor-parallel plan, made by rules on names alone."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from typing import Any

import regex
import torch
from torch import nn

from tests.device import device_type

__all__ = ["planned_config", "planned_configs", "tiny_config", "tiny_inputs", "tiny_model"]

# The first expression that matches an attribute's whole name gives its value; None, 0, 1 and False stay as they are.
_SIZES: tuple[tuple[str, int], ...] = (
    (r"num_(hidden_)?layers|n_layers?|depth|num_(en|de)coder_layers|num_blocks|.*_num_hidden_layers", 2),
    (r"(ori_)?vocab_size.*|.*_vocab_size", 64),
    (r"max_position_embeddings|n_positions|original_max_position_embeddings|max_seq_len", 64),
    (
        r"linear_num_value_heads|(mamba_|ssm_)?num_heads|(mamba_)?n_heads|n_head|(\w+_)?num_attention_heads|mamba_num_heads",
        4,
    ),
    (r"(\w+_)?num_key_value_heads|num_kv_heads|linear_num_key_heads|index_n_heads|num_key_value_groups|\w*n_heads", 2),
    (r"qk_head_dim|index_head_dim|indexer_head_dim|global_head_dim|\w*_head_dim_global", 16),
    (r"head_dim|\w+_head_dim|head_size|\w*d_head|mamba_head_dim|attention_head_size", 8),
    (r"(q|kv|o|\w*)_lora_rank|laurel_rank", 16),
    (r"hidden_size_per_layer_input|embedding_size_per_layer_input", 8),
    (r"hidden_size|d_model|n_embd|hidden_dim|dim|embed_dim|width|\w*_hidden_size|\w*hidden_dim|vision_output_dim", 32),
    (
        r"\w*intermediate_(size|dim)(_mlp|_rms)?|\w*ffn_(dim|hidden_size)|n_inner|\w*expert_(ffn_)?hidden_size|mlp_dim",
        64,
    ),
    (r"(num|n)_(local_|routed_)?experts|moe_num_experts|num_total_experts|\w*_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_(top_?k|k)|top_k(_experts)?|topk|num_selected_experts|moe_topk|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_groups?|n_groups|mamba_n_groups|\w*_n_groups", 1),
    (r"sliding_window(_size)?|attention_chunk_size|local_window_size|\w*_window(_size)?", 8),
    (r"(mamba_)?(d_)?state_size|mamba_d_state|ssm_state_size", 8),
    (r"mamba_chunk_size|chunk_size", 4),
    (r"index_topk|index_block_size|block_size", 4),
    (r"first_k_dense_replace", 1),
    (r"image_size", 16),
    (r"patch_size", 4),
    (r"num_codebooks|num_code_groups", 2),
    (r"codebook_size", 64),
)
# For attributes without a value, in models that do not derive one from the others.
_MISSING = {
    "head_dim": 8,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
# Where sizes must agree in a way that no name tells.
_AGREEING: dict[str, dict[str, Any]] = {
    "CohereCompassTextConfig": {"layer_types": ["sliding_attention", "sliding_attention"]},
    "Cosmos3EdgeTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    },
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteVisionConfig": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "Ernie4_5_VLMoeTextConfig": {"moe_intermediate_size": [64, 64]},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 2},
    "Glm5NextTextConfig": {"index_kpool": 2},
    "GraniteMoeHybridConfig": {"mamba_d_head": 16},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Llama4VisionConfig": {"projector_input_dim": 32, "projector_output_dim": 32},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "T5Gemma2DecoderConfig": {"dropout_rate": 0.0},
}
_RULES = tuple((regex.compile(pattern), size) for pattern, size in _SIZES)
_NUM_LAYERS = regex.compile(_SIZES[0][0])
_TOKEN = regex.compile(r"\w*_(token_id|token_index|id)")


@functools.cache
def planned_configs() -> Mapping[str, type]:
    """``model directory:class`` -> every configuration class of transformers with a tensor-parallel plan of its own."""
    import transformers

    packages = [package.name for package in pkgutil.iter_modules(transformers.models.__path__)]
    return {f"{package}:{kind.__name__}": kind for package in packages for kind in _configs_of(package)}


def planned_config(name: str) -> type:
    """One of them, without importing the others."""
    package, _, kind = name.partition(":")
    return next(found for found in _configs_of(package) if found.__name__ == kind)


def _configs_of(package: str) -> Iterator[type]:
    import transformers

    for name in _modules_of(package, "configuration"):
        for value in vars(importlib.import_module(name)).values():
            if (
                inspect.isclass(value)
                and issubclass(value, transformers.PreTrainedConfig)
                and value.__module__ == name
                and getattr(value, "base_model_tp_plan", None)
            ):
                yield value


def _modules_of(package: str, kind: str) -> list[str]:
    path = importlib.import_module(f"transformers.models.{package}").__path__
    return [
        f"transformers.models.{package}.{module.name}"
        for module in pkgutil.iter_modules(path)
        if module.name.startswith(f"{kind}_")
    ]


def tiny_config(kind: type, **settings: Any) -> Any:
    """A configuration of a few thousand parameters: every size replaced by rule, per-layer lists cut to one of a kind."""
    return kind(**{**_shrunk(kind()), **settings})


def _shrunk(config: Any) -> dict[str, Any]:
    values = {key: _value(config, key, value) for key, value in config.to_dict().items()}
    layers, kinds = _layer_lists(config, values)
    changed: dict[str, Any] = {}
    for key, value in values.items():
        if value is None and key in _MISSING:
            changed[key] = _MISSING[key]
        elif key in kinds:
            changed[key] = kinds[key]
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            changed[key] = type(value)(**_shrunk(value))
        elif key == "rope_parameters" and isinstance(value, dict) and _has_sections(config, value):
            changed[key] = {**value, "mrope_section": _sections(value.get("partial_rotary_factor", 1.0))}
        elif isinstance(value, bool) or value is None:
            continue
        elif isinstance(value, int):
            size = _size(key, value, layers)
            if size != value:
                changed[key] = size
        elif isinstance(value, float) and "dropout" in key:
            changed[key] = 0.0
    heads = values.get("num_attention_heads")
    if heads is not None and values.get("num_key_value_heads") == heads:
        changed["num_key_value_heads"] = changed.get("num_attention_heads", heads)
    for base in type(config).__mro__:
        changed.update(_AGREEING.get(base.__name__, {}))
    return changed


def _has_sections(config: Any, rope: Mapping[str, Any]) -> bool:
    return "mrope_section" in {*rope, *getattr(type(config), "ignore_keys_at_rope_validation", ())}


def _sections(partial: float) -> list[int]:
    """Of the pairs of a head's rotated dims, for time, height and width."""
    pairs = int(8 * partial) // 2
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def _value(config: Any, key: str, said: Any) -> Any:
    """The attribute as an object; as ``to_dict`` says it where layers differ in it."""
    try:
        return getattr(config, key, said)
    except Exception:
        return said


def _layer_lists(config: Any, values: Mapping[str, Any]) -> tuple[int, dict[str, list[Any]]]:
    """(number of layers, per-layer lists cut to it): the first layer of each kind, at least two layers."""
    depth = next((v for k, v in values.items() if _NUM_LAYERS.fullmatch(k) and isinstance(v, int)), 0)
    lists = {k: v for k, v in values.items() if isinstance(v, (list, tuple)) and len(v) == depth > 2}
    if not lists:
        return 2, {}
    kinds = list(zip(*(map(str, v) for v in lists.values())))
    chosen = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:4]
    chosen = chosen if len(chosen) > 1 else [0, 1]
    cut = {k: [_entry(k, v[i]) for i in chosen] for k, v in lists.items()}
    return len(chosen), cut


def _entry(key: str, value: Any) -> Any:
    return _size(key, value, 2) if isinstance(value, int) and not isinstance(value, bool) else value


def _size(key: str, value: int, num_layers: int) -> int:
    if _TOKEN.fullmatch(key):
        return value % 60
    if value <= 1:
        return value
    if _NUM_LAYERS.fullmatch(key):
        return num_layers
    return next((min(size, value) for rule, size in _RULES if rule.fullmatch(key)), value)


def model_class(kind: type) -> type:
    """The class to train: the causal model of a configuration, else the nearest thing to it, or what it is a part of.

    Raises LookupError when transformers has none.
    """
    import transformers

    classes = list(_model_classes(kind.__module__.split(".")[2]))
    found = [c for c in classes if c.config_class is not None and issubclass(kind, c.config_class)]
    found = found or [c for c in classes if kind in getattr(c.config_class, "sub_configs", {}).values()]
    if not found:  # a configuration that runs another model's classes
        found = [c for c in (transformers.AutoModelForCausalLM._model_mapping.get(kind, None),) if c is not None]
    order = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForMaskedLM", "Model", "")
    if not found:
        raise LookupError(f"transformers has no model for {kind.__name__}")
    return min(found, key=lambda c: next(i for i, end in enumerate(order) if c.__name__.endswith(end)))


def _model_classes(directory: str) -> Iterator[type]:
    import transformers

    for name in _modules_of(directory, "modeling"):
        for value in vars(importlib.import_module(name)).values():
            if (
                inspect.isclass(value)
                and issubclass(value, transformers.PreTrainedModel)
                and not value.__name__.endswith("PreTrainedModel")
                and value.__module__ == name
            ):
                yield value


def tiny_model(kind: type, *, meta: bool = False, **settings: Any) -> nn.Module:
    """A model of a tiny configuration; on the meta device, or with the values of seed 0."""
    made = model_class(kind)
    config = tiny_config(kind if issubclass(kind, made.config_class) else made.config_class, **settings)
    torch.manual_seed(0)
    with torch.device("meta" if meta else device_type()):
        # float64 matrices have no grouped kernel
        return made._from_config(config, experts_implementation="eager")


def tiny_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Token ids, or whatever else the forward needs to run."""
    names = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    if "input_ids" in names:
        return {"input_ids": torch.randint(3, 60, (2, 8), generator=generator)}
    raise NotImplementedError(f"{type(model).__name__}: inputs {list(names)[:6]}")
