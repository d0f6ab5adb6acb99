"""What an optimizer keeps and moves for each byte of a parameter, seen in steps of a small layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale.estimation import OpCosts, loss_of, make_batch, make_optimizer, rehearse, timeline_of
from vescale.plans import MeshAxes, Plan

_WIDTH = 512  # of a square matrix: states for each element, not those of a fixed size, are almost all


@dataclass(frozen=True)
class OptimizerCost:
    """For each byte of a parameter: bytes of states, bytes that a step reads and writes, and bytes that it holds while it
    updates this parameter; ``num_ops``, and ``on_dtensors`` of them on DTensors, for each tensor."""

    state: float = 0.0
    moved: float = 0.0
    num_ops: float = 0.0
    temporary: float = 0.0
    on_dtensors: float = 0.0


def optimizer_cost(optimizer: Any, dtype: torch.dtype) -> OptimizerCost:
    """Raises ValueError for an unknown name, TypeError for what cannot be called.

    Args:
        optimizer: a name, a function of the parameters, or None.
        dtype: of the parameters.
    """
    maker = make_optimizer(optimizer)
    if maker is None:
        return OptimizerCost()
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=dtype))
    axes = {"dp": 1}
    x = make_batch(layer, {"input": torch.empty(2, _WIDTH, dtype=dtype, device="meta")})
    seen = rehearse(layer, Plan(axes), MeshAxes.of(axes), 0, x, maker, loss_of, num_steps=2)
    costs = OpCosts({key: calls for key, calls in seen.costs.by_key.items() if key[0] == "optimizer"})
    size = _WIDTH * _WIDTH * dtype.itemsize
    moved = sum(cost.num_bytes * cost.num_calls for _, cost in costs)
    timeline = timeline_of(seen, ())
    here = [n for n, instant in enumerate(timeline.instants) if (instant.step, instant.phase) == (1, "optimizer")]
    return OptimizerCost(
        sum(state.num_bytes for state in seen.states) / size,
        moved / size,
        sum(cost.num_calls for _, cost in costs),
        float(timeline.categories["temporary"][here].max()) / size,
        sum(n for key, n in seen.costs.on_dtensors.items() if key[0] == "optimizer"),
    )
