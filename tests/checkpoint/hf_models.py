"""Small Hugging Face models of the zoo, saved as ``save_pretrained`` does, and compared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.plan_zoo.models import MODELS

__all__ = ["build", "reference", "same_values", "saved"]


def build(name: str, seed: int = 0) -> nn.Module:
    """A model of the zoo with numbers of its own in every parameter and persistent buffer."""
    model = MODELS[name].build()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def saved(name: str, folder: Path, seed: int = 1, **options: object) -> nn.Module:
    """A model whose files are in the folder."""
    model = build(name, seed)
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return model


def reference(name: str, folder: Path) -> nn.Module:
    return type(MODELS[name].build()).from_pretrained(folder)  # type: ignore[attr-defined, no-any-return]


def same_values(a: nn.Module, b: nn.Module) -> list[str]:
    """Names whose values, dtypes or shapes differ, non-persistent buffers included."""
    one, two = ({**dict(m.named_buffers()), **m.state_dict()} for m in (a, b))
    names = one.keys() | two.keys()
    return sorted(
        name
        for name in names
        if name not in one
        or name not in two
        or one[name].dtype != two[name].dtype
        or not torch.equal(one[name], two[name])
    )
