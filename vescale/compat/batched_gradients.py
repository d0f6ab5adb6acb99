"""Batches of gradients, ``torch.autograd.grad(..., is_grads_batched=True)``, for which collectives have no rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_enter: Callable[[], int] | None = getattr(torch._C, "_vmapmode_increment_nesting", None)


def backward_by_rows(run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of DTensors by ``run``, once for each gradient of a batch; without one, and of plain tensors, ``run``."""

    def backward(
        losses: Any, gradients: Any, keep: Any, creates_graph: Any, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        level = 0 if _enter is None or not any(isinstance(x, DTensor) for x in (*losses, *inputs)) else _level(_enter)
        if not level:
            return run(losses, gradients, keep, creates_graph, inputs, *args, **kwargs)
        rows: list[tuple[Any, ...]] = list(
            zip(*([None] if x is None else torch._remove_batch_dim(x, level, 1, 0) for x in gradients))
        )
        found: Sequence[Any] = [
            run(losses, row, keep or index < len(rows) - 1, creates_graph, inputs, *args, **kwargs)
            for index, row in enumerate(rows)
        ]
        return tuple(None if each[0] is None else _batched(torch.stack(each), level) for each in zip(*found))

    return backward


def _level(enter: Callable[[], int]) -> int:
    """How many batches this thread is in."""
    level = enter() - 1
    torch._C._vmapmode_decrement_nesting()
    return level


def _batched(x: torch.Tensor, level: int) -> torch.Tensor:
    batched: torch.Tensor = torch._add_batch_dim(x, 0, level)
    return batched
