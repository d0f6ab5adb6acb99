"""Pseudo-inverses with tolerances that are tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale.ops._context import OpContext
from vescale.ops._conversion import bring
from vescale.ops._registry import replaces


@replaces(torch.linalg.pinv)
def _pinv(context: OpContext, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same with whole tolerances. PyTorch's dispatcher moves no keyword operands of the op, and does not look at their
    placements: each rank would take its part or term of them for all."""

    def whole(value: Any, name: str) -> Any:
        if not isinstance(value, DTensor):
            return value
        tolerance: DTensor = value.detach()  # type: ignore[assignment]
        return bring(tolerance, (Replicate(),) * value.device_mesh.ndim, "linalg.pinv", name)

    others = [whole(value, "rcond") for value in args[1:]]
    return func(*args[:1], *others, **{k: v if k in ("A", "input") else whole(v, k) for k, v in kwargs.items()})
