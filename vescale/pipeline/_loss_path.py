"""Where a model's output has its loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale.errors import PipelineLossError
from vescale.plans import PipelineEntry

__all__ = ["check_loss", "output_at"]


def output_at(out: Any, path: str, source: Any = None) -> Any:
    """The part of a model's output that a path such as ``out.loss`` or ``out.0`` names."""
    found = out
    for name in path.split(".")[1:]:
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif name.isdigit() and isinstance(found, tuple | list) and int(name) < len(found):
            found = found[int(name)]
        elif not isinstance(found, torch.Tensor) and hasattr(found, name):
            found = getattr(found, name)
        else:
            raise PipelineLossError(
                f"pipeline: loss={path!r}: the model's output, a {type(found).__name__}, has no {name!r}; pass labels to "
                ".step() if the model needs them for its loss, or give another path or a callable f(out, batch)",
                source,
            )
    return found


def check_loss(output: Any, entry: PipelineEntry) -> None:
    """Raises PlanError if the model's output has no loss where the entry says."""
    if not isinstance(entry.loss, str):
        return
    loss = output_at(output, entry.loss, entry.source)
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise PipelineLossError(
            f"pipeline: loss={entry.loss!r} is {found}, and no tensor without dims; pass labels to .step() if the model "
            "needs them for its loss, or give another path or a callable f(out, batch) -> (sum, count)",
            entry.source,
        )
