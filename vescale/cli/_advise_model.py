"""The model of ``vescale advise``: a Hugging Face configuration, a list of shapes, or a shipped list."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from vescale.buffer import ModelShapes, group_units, shape_list, shape_list_names
from vescale.cli._main import UsageError

__all__ = ["read_model"]


def read_model(text: str) -> ModelShapes:
    """The model named on the command line.

    Raises:
        UsageError: no such file or list, a broken file, or a configuration that transformers does not know.
    """
    is_config = text.startswith("hf:")
    path = Path(text.removeprefix("hf:"))
    if not is_config and text in shape_list_names():
        return shape_list(text)
    if not path.is_file():
        names = shape_list_names()
        close = difflib.get_close_matches(text.removeprefix("hf:"), names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{text!r} is neither a file nor a shipped shape list.{hint} Shipped are {', '.join(names)}; "
            "a file is a Hugging Face config.json or a JSON list of shapes."
        )
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}. Pass a JSON file.") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}. Correct the file at this place."
        ) from error
    if is_config or (isinstance(data, dict) and "model_type" in data):
        return ModelShapes(path.name, f"Hugging Face configuration {path}", group_units(_from_config(path, data)))
    if isinstance(data, dict) and "format" in data:
        try:
            model = ModelShapes.from_json(json.dumps(data))
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        if not any(unit.parameters for unit in model.units):
            raise UsageError(f"{path}: no shapes. List at least one tensor.")
        return model
    return ModelShapes(path.name, f"shapes in {path}", group_units(_from_shapes(path, data)))


def _from_config(path: Path, data: Any) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of the model that a config.json describes, built on the meta device: no memory, no weights."""
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise UsageError(f"{path}: no model_type; expected a Hugging Face config.json. Pass shapes without 'hf:'.")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(
            "reading a Hugging Face configuration needs transformers. Install vescale[hf], or pass JSON shapes."
        ) from error
    import torch

    settings = {k: v for k, v in data.items() if k not in ("model_type", "auto_map", "quantization_config")}
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if data["model_type"] not in known:
        close = difflib.get_close_matches(data["model_type"], known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UsageError(
            f"{path}: model_type {data['model_type']!r} is unknown to transformers {transformers.__version__}.{hint}"
        )
    try:
        config = transformers.AutoConfig.for_model(data["model_type"], **settings)
        names = [name for name in data.get("architectures") or [] if hasattr(transformers, name)]
        with torch.device("meta"):
            if names:
                model = getattr(transformers, names[0])(config)
            else:
                causal = type(config) in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
                auto = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
                model = auto.from_config(config)
    except Exception as error:  # whatever a model's constructor raises on sizes that do not go together
        raise UsageError(
            f"{path}: transformers cannot build this model ({type(error).__name__}: {error}). Check the file's sizes."
        ) from error
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _from_shapes(path: Path, data: Any) -> dict[str, tuple[int, ...]]:
    """``[[4096, 4096], [4096]]``, ``[["name", [4096]], ...]`` or ``{"name": [4096], ...}``."""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif isinstance(data, list):
        pairs = [
            (entry[0], entry[1])
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            else (f"tensor{i}", entry)
            for i, entry in enumerate(data)
        ]
    else:
        raise UsageError(f"{path} holds {json.dumps(data)[:40]}; expected shapes, in a list or by name.")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UsageError(
                f"{path}: the shape of {name!r} is {json.dumps(shape)}; expected a list of sizes like [4096, 1024]."
            )
        if name in shapes:
            raise UsageError(f"{path}: {name!r} occurs twice. Give each tensor its own name.")
        shapes[name] = tuple(shape)
    if not shapes:
        raise UsageError(f"{path}: no shapes. List at least one tensor.")
    return shapes
