"""A model's copy without memory, and a batch of the sizes that are asked for."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from vescale.errors import ArgumentTypeError, EstimateError, kind_of
from vescale.estimation._input_names import check_names
from vescale.ir import copy_model, random_inputs
from vescale.rng import is_deferred
from vescale.runtime import Runtime

__all__ = ["loss_of", "make_batch", "skeleton_of"]


def skeleton_of(model: nn.Module, without: Iterable[nn.Module] = ()) -> nn.Module:
    """A copy whose parameters are on the meta device, and buffers, unless they have values and are small. Modules of
    ``without`` become empty ones.

    Raises PlanError for a model that has been parallelized.
    """
    if Runtime.of(model) is not None:
        raise EstimateError(
            f"this {type(model).__name__} has been parallelized: estimate the plan with a model as it was before (on the "
            "meta device it costs nothing), and compare with estimate.compare(model)"
        )
    memo: dict[int, Any] = {id(module): nn.Module() for module in without}
    for parameter in model.parameters():
        meta = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")
        memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta or is_deferred(buffer) or buffer.device.type != "cpu" or buffer.numel() > 1 << 20:
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="meta")
    return copy_model(model, memo)


def make_batch(model: nn.Module, batch: Mapping[str, Any], *, with_labels: bool = True) -> dict[str, Any]:
    """Tensors for ``batch``, whose values are tensors (on any device), shapes, or anything else that the forward takes.

    Raises TypeError for a batch that is no mapping, and for names that the model cannot use (:func:`check_names`).

    Args:
        model: which forward takes them.
        batch: by name.
        with_labels: add labels for models of transformers, which have a loss with them. False where the caller computes the
            loss: the model's own would take time and memory that the run does not.
    """
    if not isinstance(batch, Mapping):
        raise ArgumentTypeError(
            f"batch is {kind_of(batch)}; give a mapping from names of the forward's inputs to shapes"
        )
    check_names(model, batch)
    parameters = inspect.signature(model.forward).parameters
    found = {name: _tensor(name, value) for name, value in batch.items()}
    config = getattr(model, "config", None)
    if with_labels and config is not None and "labels" in parameters and "labels" not in found and "input_ids" in found:
        found["labels"] = torch.empty_like(found["input_ids"])
    if config is not None and "use_cache" in parameters:
        found.setdefault("use_cache", False)
    meta = {n: v for n, v in found.items() if isinstance(v, torch.Tensor) and v.is_meta}
    return {**found, **random_inputs(meta, model, 0)}


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.device.type == "cpu" else torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list) and value and all(type(n) is int for n in value):
        is_index = name.endswith(("ids", "labels", "mask", "timestep"))
        return torch.empty(value, dtype=torch.int64 if is_index else torch.get_default_dtype(), device="meta")
    return value


def loss_of(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss, else the mean of its first floating-point output."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    values = (
        list(output.values())
        if isinstance(output, Mapping)
        else list(output)
        if isinstance(output, tuple | list)
        else [output]
    )
    first = next((x for x in values if isinstance(x, torch.Tensor) and x.is_floating_point()), None)
    if first is None:
        raise ArgumentTypeError(
            f"the forward returns {type(output).__name__} without a loss; give loss=, a function of output and batch"
        )
    return first.float().mean()
