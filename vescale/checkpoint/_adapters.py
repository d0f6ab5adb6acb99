"""A model that PEFT has adapted, as its files know it: without PEFT's classes and without the adapters."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import nn

from vescale.errors import ContentMismatchError


def base_of(model: nn.Module) -> nn.Module:
    """The model inside of PEFT's, or ``model`` itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return model.get_base_model()  # type: ignore[operator]
    return model


def base_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the model that was adapted, by the names that they had: ``q_proj.weight`` for
    ``q_proj.base_layer.weight``. Those of adapters are left out.

    Raises CheckpointError for modules that PEFT trains as copies (``modules_to_save``): the copies were made of what the
    model held before.
    """
    if "peft" not in sys.modules:
        return dict(tensors)
    modules = dict(model.named_modules(remove_duplicate=False))
    if not any(_is_adapted(module) for module in modules.values()):
        return dict(tensors)
    found = {}
    for name, tensor in tensors.items():
        parts, plain = name.split("."), []
        for position, part in enumerate(parts):
            around = modules.get(".".join(parts[:position]))
            if around is None or not _is_adapted(around):
                plain.append(part)
            elif part == "modules_to_save":
                raise ContentMismatchError(
                    f"{name} is PEFT's copy of a module, which it trains instead (modules_to_save): load the weights "
                    "before get_peft_model is called, or leave modules_to_save out"
                )
            elif part not in ("base_layer", "original_module"):
                break  # an adapter's
        else:
            found[".".join(plain)] = tensor
    return found


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"
