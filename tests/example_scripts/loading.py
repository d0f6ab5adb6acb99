"""Examples as modules, and the same training on one device without vescale."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

__all__ = ["FOLDER", "arguments", "load", "losses_on_ranks", "train_plainly"]

FOLDER = Path(__file__).parent.parent.parent / "examples"


def load(name: str, folder: Path = FOLDER) -> ModuleType:
    """``examples/NAME.py``, imported from its file."""
    key = f"example {folder} {name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]


def losses_on_ranks(name: str, argv: list[str]) -> list[float]:
    """Run on a rank."""
    return load(name).main(argv)


def train_plainly(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    *,
    lr: float,
    clip: float | None = 1.0,
) -> list[float]:
    """The losses of one device: stock PyTorch alone."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def arguments(name: str, argv: list[str]) -> argparse.Namespace:
    return load(name).parse(argv)
