"""What hooks of a recorded step's graph note about gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from vescale.compat import take_moves
from vescale.static._step_records import Call, TensorRecord, Value

__all__ = ["edges_of", "forget_moves", "note_arrival", "note_sent"]


def edges_of(tensors: list[torch.Tensor], records: list[TensorRecord]) -> dict[Any, TensorRecord]:
    """Where gradients of the tensors go to: (node, number)."""
    found = {}
    for x, record in zip(tensors, records, strict=True):
        if x.requires_grad and torch.is_grad_enabled():
            edge = get_gradient_edge(x)
            found[edge.node, edge.output_nr] = record
    return found


def forget_moves(_: Any) -> None:
    """Before a node of a call runs: what has moved gradients so far was not this call."""
    take_moves()


def note_sent(call: Call | None, records: dict[int, TensorRecord], sent: Any, arrived: Any) -> None:
    """After a node of ``call`` has run."""
    if take_moves() and call is not None:
        call.moves_gradients = True
    for index, record in records.items():
        if isinstance(sent[index], DTensor):
            record.grads.add(tuple(sent[index].placements))


def note_arrival(value: Value, number: int, grads: tuple[torch.Tensor | None, ...]) -> None:
    """A gradient has arrived at a tensor, which is output ``number`` of its node."""
    grad = grads[number]
    if isinstance(grad, DTensor):
        value.grads.add(tuple(grad.placements))
