"""Micro-batches of a batch, and what is known of batches of the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vescale.errors import PipelineBatchError
from vescale.pipeline._headers import HeaderExchange
from vescale.pipeline._trace import Trace
from vescale.plans import PipelineEntry

__all__ = ["Signature", "like", "microbatches_of"]


class Signature:
    """What is known of batches of one signature: traces, headers and the rows of random numbers."""

    def __init__(self, whole: Trace, part: Trace, headers: HeaderExchange, entry: PipelineEntry) -> None:
        self.whole, self.part, self.headers = whole, part, headers
        self.dims = _batch_dims(whole, part, entry)


def microbatches_of(batch: Mapping[str, Any], entry: PipelineEntry) -> list[dict[str, Any]]:
    """The micro-batches of a batch: equal parts of each tensor along dim 0.

    Tensors without dims, tensors of one row beside others of several, and other values go to every micro-batch as they
    are. Raises PlanError for sizes that cannot be cut.
    """
    m = entry.microbatches
    rows = {name: value.shape[0] for name, value in batch.items() if isinstance(value, torch.Tensor) and value.ndim}
    size = max(rows.values(), default=0)
    other = {name: n for name, n in rows.items() if n not in (1, size)}
    if not rows or other:
        raise PipelineBatchError(
            f"pipeline: the batch has {'no tensors' if not rows else f'tensors of different sizes in dim 0: {rows}'}; give "
            ".step() tensors that all have the batch in dim 0",
            entry.source,
        )
    if size % m:
        raise PipelineBatchError(
            f"pipeline: a batch of {size} rows cannot be cut into {m} equal micro-batches; give a multiple of {m} rows, or "
            "another microbatches=",
            entry.source,
        )
    part = size // m

    def cut(name: str, value: Any, index: int) -> Any:
        return value[index * part : (index + 1) * part] if name in rows and rows[name] == size else value

    return [{name: cut(name, value, index) for name, value in batch.items()} for index in range(m)]


def _batch_dims(whole: Trace, part: Trace, entry: PipelineEntry) -> dict[tuple[int, ...], int | None]:
    """For each shape that is drawn in a micro-batch, its dim that is cut. Raises PlanError where that is ambiguous."""
    m = entry.microbatches
    if [d.op for d in whole.draws] != [d.op for d in part.draws]:
        raise PipelineBatchError(
            f"pipeline: the forward draws {len(whole.draws)} times for the whole batch, and {len(part.draws)} times for a "
            "micro-batch; its random numbers cannot be those of one device",
            entry.source,
        )
    found: dict[tuple[int, ...], int | None] = {}
    for big, small in zip(whole.draws, part.draws):
        different = [d for d, (a, b) in enumerate(zip(big.shape, small.shape)) if a != b]
        fits = len(big.shape) == len(small.shape) and len(different) <= 1
        if not fits or any(big.shape[d] != m * small.shape[d] for d in different):
            raise PipelineBatchError(
                f"pipeline: {small.op.name} draws for a tensor of shape {big.shape} of the batch, and {small.shape} of "
                f"a micro-batch, which is not one of {m} parts of it along a dim; its random numbers cannot be those of one "
                "device",
                entry.source,
            )
        dim = different[0] if different else None
        if found.setdefault(small.shape, dim) != dim:
            raise PipelineBatchError(
                f"pipeline: tensors of shape {small.shape} are drawn that depend on the batch, and others that do not; give "
                "one of them another shape",
                entry.source,
            )
    return found


def like(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"{type(value).__name__} {value!r}"[:200]
