"""The loss of a micro-batch as its share of the whole batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from vescale.errors import PipelineCallError, PipelineLossError
from vescale.pipeline._trace import LossTerm
from vescale.plans import PipelineEntry

__all__ = ["BatchLoss", "check_loss", "output_at"]

_SUM, _MEAN = 2, 1


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


class BatchLoss:
    """How micro-batches' losses add up to that of the whole batch.

    A mean over labels is computed as the sum over a micro-batch's labels, divided by the average number of valid labels in
    a micro-batch; a mean over anything else is left as it is; and each micro-batch counts ``1 / microbatches``. Where the
    model adds up instead of taking a mean, micro-batches are added up.
    """

    def __init__(self, entry: PipelineEntry, terms: Sequence[LossTerm], batch: Mapping[str, Any]) -> None:
        self.entry, self.counts = entry, []
        self.weight = 1.0 / entry.microbatches
        means = [term for term in terms if term.reduction == _MEAN]
        sums = [term for term in terms if term.reduction == _SUM]
        if callable(entry.loss):
            self.weight = 1.0
            return
        if sums and means:
            raise PipelineLossError(
                f"pipeline: loss={entry.loss!r} has {len(means)} means over labels and {len(sums)} sums; how micro-batches "
                "add up is not known: give a callable loss=f(out, batch) -> (sum, count)",
                entry.source,
            )
        if sums:
            self.weight = 1.0
        for term in means:
            if term.target is None or term.has_weight:
                what = "weights of classes" if term.has_weight else "labels that the model computes from its parameters"
                raise PipelineLossError(
                    f"pipeline: loss={entry.loss!r} is a mean with {what}, so that the number of valid labels is not known "
                    "before the forward: give a callable loss=f(out, batch) -> (sum, count)",
                    entry.source,
                )
            self.counts.append(int((term.target(batch) != term.ignore_index).sum()))

    def around_forward(self) -> TorchFunctionMode | None:
        """A mode for the last stage's forward of one micro-batch."""
        return _Means([count / self.entry.microbatches for count in self.counts]) if self.counts else None

    def share(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The micro-batch's part of the loss of the whole batch; of a callable, the sum, to be divided by the count."""
        assert isinstance(self.entry.loss, str)
        loss: torch.Tensor = output_at(out, self.entry.loss, self.entry.source)
        return loss if self.weight == 1.0 else loss * self.weight


class _Means(TorchFunctionMode):
    """``cross_entropy`` and ``nll_loss`` that take a mean divide by the given numbers, call by call."""

    def __init__(self, counts: Sequence[float]) -> None:
        super().__init__()
        self._counts = list(counts)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (F.cross_entropy, F.nll_loss):
            return func(*args, **kwargs)
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
        given = {**dict(zip(names, args)), **kwargs}
        if given.get("reduction", "mean") != "mean" or given["target"].is_floating_point():
            return func(*args, **kwargs)
        if not self._counts:
            raise PipelineCallError(
                "pipeline: the last stage computes more losses than the trace of the whole model did"
            )
        count = self._counts.pop(0)
        total = func(**{**given, "reduction": "sum"})
        # Without any valid label one device's mean is nan, and so is this.
        return total * (1.0 / count if count else float("nan"))
