"""What of a pipeline can be checked before there is a batch: its cut and its loss, in a forward of guessed inputs."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vescale.errors import PipelineBatchError, PipelineLossError, PipelineTraceError
from vescale.ir import random_inputs, skeleton_of
from vescale.pipeline._batches import Signature, microbatches_of, traced_pair
from vescale.pipeline._block_work import guessed_inputs
from vescale.pipeline._cut import Cut
from vescale.pipeline._headers import HeaderExchange
from vescale.pipeline._loss import BatchLoss
from vescale.pipeline._loss_path import check_loss
from vescale.plans import PipelineEntry

__all__ = ["check_with_guesses", "without_guesses"]

_LENGTH = 16  # tokens


_OFF: contextvars.ContextVar[bool] = contextvars.ContextVar("_OFF", default=False)


@contextlib.contextmanager
def without_guesses() -> Iterator[None]:
    """A context in which plans are lowered without :func:`check_with_guesses`: of a plan that has passed it."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def check_with_guesses(
    model: nn.Module, skeleton: nn.Module, cut: Cut, entry: PipelineEntry
) -> PipelineLossError | None:
    """Trace the gated ``skeleton`` of ``model`` with the first guess of inputs that its forward takes. Where it takes none,
    the first step is the first check.

    Raises PlanError for a forward that the cut does not fit, and for a loss that does not add up over micro-batches. What
    depends on the sizes of a batch is left to the steps. Returns what is wrong with an output that has no loss where the
    entry says, if that is not for the lack of labels.
    """
    if _OFF.get():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about guesses
        for guess in guessed_inputs(skeleton_of(model).to("meta"), 2 * entry.microbatches, _LENGTH):
            try:
                batch = random_inputs(guess, model, 0)
                with torch.enable_grad():
                    whole, part = traced_pair(skeleton, cut, entry, batch, microbatches_of(batch, entry)[0])
            except PipelineTraceError:
                raise
            except Exception:  # the forward does not take this guess
                continue
            if callable(entry.loss):
                return None
            try:
                check_loss(part.output, entry)
            except PipelineLossError as problem:
                return problem if _has_labels(model, batch) else None
            with contextlib.suppress(PipelineBatchError):  # of the sizes that were guessed
                BatchLoss(entry, Signature(whole, part, HeaderExchange(""), entry), batch)
            return None
    return None


def _has_labels(model: nn.Module, batch: Mapping[str, Any]) -> bool:
    """Whether the forward would not return more if it were given more."""
    parameters = inspect.signature(model.forward).parameters.values()
    others = [p for p in parameters if p.name not in batch]
    return not others or any("label" in name or "target" in name for name in batch)
