"""What a step communicates without an entry of the plan; without numbers and ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vescale._parallelize import parallelize
from vescale.compat.simulated_ranks import fake_world
from vescale.estimation._depth import first_and_last_of
from vescale.estimation._memory_log import Instant, MemoryLog
from vescale.estimation._rehearsal import apart, given
from vescale.estimation._skeleton import loss_of, skeleton_of
from vescale.estimation._unfilled import Routing, UnfilledTensors
from vescale.fsdp import values_are_of_no_interest
from vescale.ir import repeats_of
from vescale.plans import Plan
from vescale.runtime import ImplicitCommunicationWarning


def forward_reports(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], loss: Any = None) -> tuple[str, ...]:
    """What a forward and backward of rank 0 communicate without an entry: a text for each entry that would place the
    operands, layers merged. Of equal blocks that follow each other, the first and the last run.

    Args:
        model: as before ``parallelize``, on any device; it is left as it is.
        inputs: of its forward, by name; values of floating-point tensors are not used.
        loss: ``(output, inputs)`` to the number of which gradients are taken; default: ``output.loss``, or the mean.

    Raises what ``parallelize`` and the forward raise: code that branches on values may not run without them.
    """
    if plan.pipeline_entry is not None:  # stages run the same ops; the model as a whole shows them all
        plan = plan.stage_plan()
    repeats = repeats_of(model)
    copied = first_and_last_of(model, repeats)
    try:
        return _reports(copied, plan, inputs, loss)
    except Exception:
        if not repeats:
            raise
        return _reports(skeleton_of(model), plan, inputs, loss)  # the forward, or the plan, names modules by number


def _reports(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], loss: Any) -> tuple[str, ...]:
    mode = UnfilledTensors(MemoryLog(lambda: Instant(0, "forward", None)), Routing(), lambda *_: None)
    with fake_world(math.prod(plan.axes.sizes), 0), apart(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", ImplicitCommunicationWarning)
        parallelize(model, plan if plan.mesh is None else plan.without_mesh())
        with mode:
            with values_are_of_no_interest():
                model.to_empty(device="cpu")
            batch = {name: given(mode, _whole(value)) for name, value in inputs.items()}
            (loss or loss_of)(model(**batch), batch).backward()
    return tuple(str(each.message) for each in caught if isinstance(each.message, ImplicitCommunicationWarning))


def _whole(value: Any) -> Any:
    """A tensor with memory: indices are zeros."""
    return torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) and value.is_meta else value
