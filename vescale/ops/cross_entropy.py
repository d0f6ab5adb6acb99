"""``F.cross_entropy`` with label smoothing on DTensors, inside a model: one device's value, and no gathered logits.

The smoothed loss of a row is ``(1 - s) * nll + s / C * -sum(weight * log_softmax)``. The negative log likelihood
communicates as in :mod:`vescale.ops.losses`; the second part adds an all-reduce of one number over the axes that shard
rows or classes (without a reduction, of one number a row over those that shard classes).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import no_torch_function
from vescale.ops._context import OpContext
from vescale.ops._conversion import convert, enter_local, leave_local
from vescale.ops._registration import replaces
from vescale.ops.losses import local_part, without_dim
from vescale.placements import at_dim, shard_dim, without_partials

__all__ = ["cross_entropy"]

_SIGNATURE = inspect.signature(F.cross_entropy)
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_OP = "cross_entropy: label smoothing"


def _is_smoothed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return bool(_SIGNATURE.bind(*args, **kwargs).arguments.get("label_smoothing", 0.0))


@replaces(F.cross_entropy, changes=_is_smoothed, communicates=("all_reduce",))
def cross_entropy(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Without smoothing, and where targets are probabilities, this is torch's own composite."""
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    options = call.arguments
    logits, target, smoothing = options["input"], options["target"], options["label_smoothing"]
    legacy = options["size_average"] is not None or options["reduce"] is not None
    if not smoothing or legacy or target.is_floating_point() or options["reduction"] not in _REDUCTIONS:
        return func(*args, **kwargs)
    if not 0 < smoothing <= 1:
        return func(*args, **kwargs)  # torch's own error
    return _smoothed(logits, target, options["weight"], options["ignore_index"], options["reduction"], smoothing)


def _smoothed(
    logits: DTensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, reduction: str, smoothing: float
) -> torch.Tensor:
    class_dim = 0 if logits.ndim == 1 else 1
    num_classes = logits.shape[class_dim]
    scores: Any = F.log_softmax(logits, class_dim)
    op = torch.ops.aten.nll_loss2d_forward if logits.ndim == 4 else torch.ops.aten.nll_loss_forward
    if logits.ndim in (1, 2, 4):
        nll, total_weight = op(scores, target, weight, _REDUCTIONS[reduction], ignored)
    else:  # (N, C, d1, ...) as (N, C, d1, the rest)
        shape = (*logits.shape[:2], logits.shape[2], -1)
        nll, total_weight = torch.ops.aten.nll_loss2d_forward(
            scores.reshape(shape),
            target.reshape(target.shape[0], target.shape[1], -1),
            weight,
            _REDUCTIONS[reduction],
            ignored,
        )
        nll = nll.view(target.shape) if reduction == "none" else nll
    uniform = _uniform(scores, target, weight, ignored, class_dim, per_row=reduction == "none")
    uniform = uniform / total_weight if reduction == "mean" else uniform
    return (1 - smoothing) * nll + uniform * (smoothing / num_classes)


def _uniform(
    scores: DTensor, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, class_dim: int, *, per_row: bool
) -> torch.Tensor:
    """``-sum(weight * scores)`` over the classes, and over the rows that are not ignored unless ``per_row``."""
    mesh, placements = scores.device_mesh, tuple(scores.placements)
    rows = tuple(without_dim(placement, class_dim) for placement in placements)
    classes: list[Placement] = [at_dim(p, 0) if shard_dim(p) == class_dim else Replicate() for p in placements]
    local = enter_local(scores)
    with no_torch_function():
        counted = local_part(target, mesh, rows, _OP, "target") != ignored
        if weight is not None:
            shape = [-1 if dim == class_dim else 1 for dim in range(scores.ndim)]
            local = local * local_part(weight, mesh, classes, _OP, "weight").view(shape)
        local = -local.sum(class_dim) * counted
        if not per_row:
            local = local.sum()
    pending: list[Placement] = [
        Partial() if shard_dim(own) == class_dim or (shard_dim(own) is not None and not per_row) else row
        for own, row in zip(placements, rows)
    ]
    shape = [size for dim, size in enumerate(scores.shape) if dim != class_dim] if per_row else []
    result = leave_local(local, mesh, pending, shape, _OP)
    return convert(result, without_partials(pending), requester=_OP)
