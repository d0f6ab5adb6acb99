"""Inputs to trace a model's forward with, guessed from its signature, its config and its first layer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale.errors import ExampleInputsError
from vescale.plans import config_value


def example_inputs(model: nn.Module, batch: int = 8, length: int = 128) -> dict[str, Any]:
    """Meta tensors that the forward runs with.

    Args:
        model: a model on the meta device.
        batch: rows.
        length: tokens of a row, or the edge of an image.

    Raises:
        PlanError: none of the guesses runs.
    """
    found = hf_inputs(model, batch, length)
    if found:
        return found
    required = [
        name
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(required) == 1:
        for guess in _guesses(model, batch, length):
            try:
                model(guess)
            except Exception:  # the next guess
                continue
            return {required[0]: guess}
    raise ExampleInputsError(
        f"the inputs of {type(model).__name__}.forward({', '.join(required)}) cannot be guessed; give them, as inputs= (or "
        "--input x=8x16 for each)"
    )


def _guesses(model: nn.Module, batch: int, length: int) -> Iterator[torch.Tensor]:
    """By the model's first layer."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield torch.empty(batch, length, dtype=torch.int64, device="meta")
        elif isinstance(module, nn.Linear):
            yield torch.empty(batch, length, module.in_features, device="meta")
            yield torch.empty(batch, module.in_features, device="meta")
        elif isinstance(module, nn.Conv2d):
            yield torch.empty(batch, module.in_channels, 32, 32, device="meta")
            yield torch.empty(batch, module.in_channels, 224, 224, device="meta")
        else:
            continue
        return


def dtype_of_input(name: str) -> torch.dtype:
    """What an input of a model of transformers has, by its name: token ids, labels, masks and time steps are integers."""
    is_index = name.endswith(("ids", "labels", "mask", "timestep"))
    return torch.int64 if is_index else torch.get_default_dtype()


def hf_inputs(model: nn.Module, batch: int, length: int) -> dict[str, Any]:
    """Token ids with labels, images or sounds, for models of transformers; nothing for others."""
    names = inspect.signature(model.forward).parameters
    config: Any = getattr(model, "config", None)
    text = getattr(config, "text_config", None) or config
    most = min((n for n in (_number(text, _POSITIONS), length) if n), default=length)
    tokens = torch.empty(batch, most, dtype=torch.int64, device="meta")
    found: dict[str, Any] = {}
    if "pixel_values" in names and _is_main(model, "pixel_values", names):
        vision = getattr(config, "vision_config", None) or config
        size = getattr(vision, "image_size", None) or 224
        height, width = size if isinstance(size, tuple | list) else (size, size)
        channels = getattr(vision, "num_channels", None) or 3
        found["pixel_values"] = torch.empty(batch, channels, height, width, device="meta")
    if "input_values" in names:
        found["input_values"] = torch.empty(batch, 16 * length, device="meta")
    if "input_features" in names:
        bins = getattr(config, "num_mel_bins", None) or 80
        frames = 2 * (getattr(config, "max_source_positions", None) or length)
        found["input_features"] = torch.empty(batch, bins, frames, device="meta")
    if "input_ids" in names:
        found["input_ids"] = tokens
    if not found:
        return {}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        found["decoder_input_ids"] = tokens
    found |= _labels(model, names, tokens)
    if "use_cache" in names:
        found["use_cache"] = False
    return found


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")
# Ends of class names -> what labels are: a class for each sequence, a token or class for each token.
_LABELS = {
    "ForSequenceClassification": "sequence",
    "ForImageClassification": "sequence",
    "ForMultipleChoice": "",
    "ForTokenClassification": "token",
    "ForCausalLM": "token",
    "LMHeadModel": "token",
    "ForMaskedLM": "token",
    "ForConditionalGeneration": "token",
}


def _labels(model: nn.Module, names: Mapping[str, Any], tokens: torch.Tensor) -> dict[str, Any]:
    kind = next((kind for end, kind in _LABELS.items() if type(model).__name__.endswith(end)), "")
    if "labels" not in names or not kind:
        return {}
    return {"labels": tokens if kind == "token" else tokens[:, 0]}


def _is_main(model: nn.Module, name: str, names: Mapping[str, Any]) -> bool:
    return (
        "input_ids" not in names
        or getattr(model, "main_input_name", name) == name
        or names[name].default is inspect.Parameter.empty
    )


def _number(config: Any, names: tuple[str, ...]) -> int | None:
    found = (config_value(config, name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def random_inputs(inputs: Mapping[str, Any], model: nn.Module, seed: int) -> dict[str, Any]:
    """Random numbers in the shapes of meta tensors; whole numbers below the size of the vocabulary, labels below the number
    of classes."""
    generator = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    vocabulary = _number(getattr(config, "text_config", config), ("vocab_size",)) or min(tables, default=2)
    is_class = type(model).__name__.endswith(("Classification", "Classifier"))
    classes = (_number(config, ("num_labels",)) or 2) if is_class else vocabulary
    found = dict(inputs)
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        if value.is_floating_point():
            found[name] = torch.randn(value.shape, dtype=value.dtype, generator=generator)
        else:
            most = classes if name == "labels" else vocabulary
            found[name] = torch.randint(0, most, value.shape, dtype=value.dtype, generator=generator)
    return found
