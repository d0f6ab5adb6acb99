"""Where a model's output has its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vescale.compat import map_tensors, no_torch_function, tensors_in
from vescale.compat.tensor_subclasses import without_modes
from vescale.errors import PipelineLossError, kind_of
from vescale.pipeline._traced_functions import UnknownValueError
from vescale.plans import PipelineEntry, PlanError


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
                f"pipeline: loss={path!r}: the model's output, {kind_of(found)}, has no {name!r}; pass labels to "
                ".step() if the model needs them for its loss, or write another path or a callable f(out, batch)",
                source,
            )
    return found


def check_loss(output: Any, entry: PipelineEntry) -> None:
    """Raises PlanError if the model's output has no loss where the entry says."""
    if not isinstance(entry.loss, str):
        return
    loss = output_at(output, entry.loss, entry.source)
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"{kind_of(loss)}"
        raise PipelineLossError(
            f"pipeline: loss={entry.loss!r} is {found}, not a scalar tensor; pass labels to .step() if the model "
            "needs them for its loss, or write another path or a callable f(out, batch) -> (sum, count)",
            entry.source,
        )


def try_loss(entry: PipelineEntry, output: Any, batch: Mapping[str, Any]) -> torch.Tensor | None:
    """Call a callable loss in a trace, with what a forward without values has returned: an error in it is raised on every
    rank, and not on the last one alone, for which the others would wait. One that reads values is left to the step. Returns
    the sum, if that is traced.

    Raises PlanError for a callable that raises, also with an output that has values, and for one that returns no sum and
    count.
    """
    assert callable(entry.loss)
    given = f"the model's output, {kind_of(output)}, and a batch of {', '.join(map(repr, batch))}"
    try:
        found = entry.loss(output, dict(batch))
    except UnknownValueError:
        return None
    except PlanError:
        raise
    except Exception as first:
        try:
            found = _with_values(entry.loss, output, batch)
        except Exception as error:
            raise PipelineLossError(
                f"pipeline: the callable loss raises {type(error).__name__}: {error}, with {given}; expected a "
                "function f(out, batch) -> (sum, count) of both",
                entry.source,
            ) from first
    pair = found if isinstance(found, tuple | list) and len(found) == 2 else (None, None)
    are_scalars = [isinstance(v, int | float) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in pair]
    if not all(are_scalars) or not isinstance(pair[0], torch.Tensor) or pair[0].ndim:
        shown = [tuple(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__ for v in pair]
        what = f"a pair of {shown[0]} and {shown[1]}" if pair[0] is not None else f"{kind_of(found)}"
        raise PipelineLossError(
            f"pipeline: the callable loss returns {what}, with {given}; return the sum over the micro-batch, a scalar "
            "tensor, and the count by which the sum over all micro-batches is divided",
            entry.source,
        )
    total: torch.Tensor = pair[0]
    return total


def _with_values(loss: Callable[[Any, Any], Any], output: Any, batch: Mapping[str, Any]) -> Any:
    """What the loss returns for an output of the same shapes on the device of the batch. The meta device has no autocast,
    and differs from that of the batch, which a loss may check."""
    device = next((v.device for v in tensors_in(dict(batch)) if not v.is_meta), torch.device("cpu"))

    def fill(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device=device) if x.is_meta else x

    with without_modes(), no_torch_function():
        return loss(map_tensors(fill, output), dict(batch))
