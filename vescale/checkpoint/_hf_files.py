"""What a folder of Hugging Face has beside the weights: configuration, generation settings, tokenizer, custom code."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale.checkpoint._hf_conversion import is_transformers_model, written_class

__all__ = ["copy_beside", "file_base", "write_beside"]

_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "*.py",
)


def file_base(model: nn.Module) -> str:
    """The name that the weights' files begin with."""
    return "diffusion_pytorch_model" if _is_diffusers_model(model) else "model"


def _is_diffusers_model(model: Any) -> bool:
    return not is_transformers_model(model) and callable(getattr(model, "save_config", None))


def write_beside(model: Any, folder: Path, source: Path | None, dtype: torch.dtype | None) -> None:
    """Write the model's configuration, and copy tokenizer files and code from the folder that it came from.

    Args:
        dtype: of the weights, for the configuration.
    """
    if source is not None and source.is_dir() and source.resolve() != folder.resolve():
        copy_beside(source, folder)
    if _is_diffusers_model(model):
        model.save_config(folder)
    if not is_transformers_model(model):
        return
    config = copy.deepcopy(model.config)
    if dtype is not None:
        config.dtype = dtype
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # what is written are values
    config.architectures = [written_class(type(model)).__name__]
    config.save_pretrained(folder)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def copy_beside(source: Path, folder: Path, *, configuration: bool = False) -> list[str]:
    """Copy tokenizer files and code, and with ``configuration`` the configuration files, too; returns their names."""
    patterns = (*_COPIED, "config.json", "generation_config.json") if configuration else _COPIED
    names = sorted({path.name for pattern in patterns for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, folder / name)
    return names
