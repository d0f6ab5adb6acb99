"""The loss of a micro-batch as its share of the whole batch's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vescale.errors import PipelineCallError
from vescale.pipeline._batches import Signature
from vescale.pipeline._loss_path import output_at
from vescale.pipeline._loss_sums import is_mean_of_labels, two_scalars
from vescale.pipeline._traced import MEAN
from vescale.plans import PipelineEntry


class BatchLoss:
    """How micro-batches' losses add up to that of the whole batch.

    A mean over labels is computed as the sum over a micro-batch's labels, divided by the number of valid labels in the
    batch, or by the average number in a micro-batch where a weight follows; where a sum or mean is divided by a number that
    the forward counts in the batch (``mask.sum()``), it is divided by that of the whole batch; and each micro-batch counts
    by the weight of its :class:`LossShare`.
    """

    def __init__(self, entry: PipelineEntry, known: Signature, batch: Mapping[str, Any]) -> None:
        self.entry = entry
        self.counts: dict[int, list[float]] = defaultdict(list)  # by stage
        share = known.loss.share
        self.weight, self._parts = share.weight, share.parts
        self.scalars = {call: (n, compute(batch).item()) for call, (n, compute) in share.scalars.items()}
        if callable(entry.loss) or entry.microbatches == 1 or known.loss.whole:
            return
        terms = [term for term in known.whole.losses if term.reduction == MEAN]
        for term in terms if all(term.is_known for term in terms) else ():
            self.counts[term.stage].append(term.count(batch))

    def around_forward(self, stage: int) -> _Shares | None:
        """A mode for a stage's forward of one micro-batch; None: it computes nothing of the loss."""
        counts = [count * self._parts / self.entry.microbatches for count in self.counts.get(stage, ())]
        scalars = {number: scalar for (of, number), scalar in self.scalars.items() if of == stage}
        return _Shares(counts, scalars, is_active=not stage) if counts or scalars else None

    def share(self, out: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        """The micro-batch's part of the loss of the whole batch; of a callable, the sum, to be divided by the count."""
        assert isinstance(self.entry.loss, str)
        loss: torch.Tensor = output_at(out, self.entry.loss, self.entry.source)
        return loss if self.weight == 1.0 else loss * self.weight


class _Shares(TorchFunctionMode):
    """``cross_entropy`` and ``nll_loss`` that take a mean divide by the given numbers, call by call; multiplications of
    scalars are by ``scalars``, by number. Both from where the stage begins."""

    def __init__(self, counts: Sequence[float], scalars: Mapping[int, tuple[int, float]], *, is_active: bool) -> None:
        super().__init__()
        self._counts, self._scalars, self._next, self._is_active = list(counts), scalars, 0, is_active

    def begin(self) -> None:
        self._is_active = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_active:
            return func(*args, **kwargs)
        if self._scalars and two_scalars(func, args, kwargs):
            self._next += 1
            scalar = self._scalars.get(self._next - 1)
            return func(*args, **kwargs) if scalar is None else _scaled(func, args, kwargs, *scalar)
        given = is_mean_of_labels(func, args, kwargs)
        if given is None:
            return func(*args, **kwargs)
        if not self._counts:
            raise PipelineCallError("pipeline: a stage computes more losses than the trace of the whole model did")
        count = self._counts.pop(0)
        total = func(**{**given, "reduction": "sum"})
        # Without any valid label one device's mean is nan, and so is this.
        return total * (1.0 / count if count else float("nan"))


def _scaled(func: Any, args: Any, kwargs: Mapping[str, Any], position: int, scalar: float) -> Any:
    """The call with a number in place of the operand at a position."""
    operands = (*args, *kwargs.values())
    kept = operands[1 - position]
    dtype = torch.promote_types(operands[0].dtype, operands[1].dtype)
    return func(kept if kept.dtype == dtype else kept.to(dtype), scalar)
