"""The loss of a micro-batch as its share of the whole batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vescale.errors import PipelineCallError
from vescale.pipeline._batches import Signature
from vescale.pipeline._loss_path import output_at
from vescale.pipeline._traced import MEAN
from vescale.pipeline._traced_functions import is_mean_of_labels
from vescale.plans import PipelineEntry


class BatchLoss:
    """How micro-batches' losses add up to that of the whole batch.

    A mean over labels is computed as the sum over a micro-batch's labels, divided by the number of valid labels in the
    batch, or by the average number in a micro-batch where a weight follows.
    """

    def __init__(self, entry: PipelineEntry, known: Signature, batch: Mapping[str, Any]) -> None:
        self.entry, self._batch = entry, batch
        self.weight, self._parts = known.loss.weight, 1 if known.loss.of_labels else entry.microbatches
        terms = [term for term in known.whole.losses if term.reduction == MEAN]
        has_shares = not (callable(entry.loss) or entry.microbatches == 1 or known.loss.whole)
        self._terms = terms if has_shares and all(term.is_known for term in terms) else []
        self._counts: dict[int, list[torch.Tensor]] = {}  # by stage

    def around_forward(self, stage: int) -> _Shares | None:
        """A mode for a stage's forward of one micro-batch; None: it computes nothing of the loss."""
        if stage not in self._counts:
            self._counts[stage] = [t.count(self._batch) / self._parts for t in self._terms if t.stage == stage]
        counts = self._counts[stage]
        return _Shares(counts, is_active=not stage) if counts else None

    def share(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The micro-batch's part of the loss of the whole batch; of a callable, the sum, to be divided by the count."""
        assert isinstance(self.entry.loss, str)
        loss: torch.Tensor = output_at(out, self.entry.loss, self.entry.source)
        return loss if self.weight == 1.0 else loss * self.weight


class _Shares(TorchFunctionMode):
    """``cross_entropy`` and ``nll_loss`` that take a mean divide by the given numbers, call by call, from where the stage
    begins."""

    def __init__(self, counts: Sequence[torch.Tensor], *, is_active: bool) -> None:
        super().__init__()
        self._counts, self._is_active = list(counts), is_active

    def begin(self) -> None:
        self._is_active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = is_mean_of_labels(func, args, kwargs) if self._is_active else None
        if given is None:
            return func(*args, **kwargs)
        if not self._counts:
            raise PipelineCallError("pipeline: a stage computes more losses than the trace of the whole model did")
        count = self._counts.pop(0)
        total = func(**{**given, "reduction": "sum"})
        # Without any valid label the total is 0, one device's mean is nan, and so is this.
        wide = torch.promote_types(total.dtype, torch.float32)
        return (total.to(wide) * count.reciprocal().to(wide)).to(total.dtype)
