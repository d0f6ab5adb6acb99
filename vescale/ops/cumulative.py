"""Sums and products of all elements up to each one."""

from __future__ import annotations

from typing import Any

import torch

from vescale.ops._registration import handles

__all__: list[str] = []

_aten = torch.ops.aten


def _counts_from_the_end(op: Any, schema: Any) -> bool:
    dim = schema.args_schema[1] if len(schema.args_schema) > 1 else 0
    return isinstance(dim, int) and dim < 0 < schema.args_schema[0].ndim


@handles(
    _aten.cumsum.default,
    _aten.cumprod.default,
    _aten.logcumsumexp.default,
    applies=_counts_from_the_end,
)
def _scan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over the positive number of the dim. PyTorch takes a negative one for that of a dim that is whole: each rank begins
    anew."""
    x, dim, *others = args
    return op(x, dim % x.ndim, *others, **kwargs)
