"""Sums and products of all elements up to each one."""

from __future__ import annotations

from typing import Any

import torch

from vescale.ops._registration import handles
from vescale.ops._row_reductions import dims_of, reduces_a_shard

__all__: list[str] = []

_aten = torch.ops.aten


def _counts_from_the_end(op: Any, schema: Any) -> bool:
    """Whether ``op(x, dim, ...)`` is over a sharded dim that has a negative number."""
    x, dim = schema.args_schema[0], dims_of(schema)
    return isinstance(dim, int) and dim < 0 < x.ndim and reduces_a_shard(x, dim)


@handles(
    _aten.cumsum.default,
    _aten.cumprod.default,
    _aten.logcumsumexp.default,
    applies=_counts_from_the_end,
)
def _scan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same over the dim's positive number, which is what PyTorch's rule compares with the dims of shards: for a negative
    one, each rank would begin anew."""
    x, dim, *others = args
    return op(x, dim % x.ndim, *others, **kwargs)
