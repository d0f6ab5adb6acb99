"""PyTorch's sharding decisions for dims with fewer elements than ranks: a batch of 1 over 2.

PyTorch's rules do not shard a dim of which ranks would hold nothing, although they are the same for any size.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._ops import utils

from vescale.compat.patching import Changes

_DECIDING = threading.local()


def let_shards_be_empty(changes: Changes, _: Any) -> None:
    """Within :func:`with_empty_shards`, PyTorch's rules shard any dim."""
    original = utils.is_tensor_shardable

    @functools.wraps(original)
    def is_tensor_shardable(*args: Any, **kwargs: Any) -> bool:
        return getattr(_DECIDING, "now", False) or original(*args, **kwargs)

    changes.function(original, is_tensor_shardable)


@contextlib.contextmanager
def with_empty_shards() -> Iterator[None]:
    """Decide on this thread as if each sharded dim had an element for each rank. The caller has to see that the op takes
    empty local tensors, and that nothing is computed from a rank's share of elements."""
    _DECIDING.now = True
    try:
        yield
    finally:
        _DECIDING.now = False


def has_empty_shards(spec: DTensorSpec) -> bool:
    """Whether a dim has fewer elements than the axes that shard it have ranks."""
    parts: dict[int, int] = {}
    for axis, placement in enumerate(spec.placements):
        if type(placement) is Shard:
            parts[placement.dim] = parts.get(placement.dim, 1) * spec.mesh.size(axis)
    return any(dim < len(spec.shape) and spec.shape[dim] < number for dim, number in parts.items())


def some_rank_holds_nothing(spec: DTensorSpec) -> bool:
    """Whether a rank has no element of a dim: of fewer elements than ranks, and of 5 over 4, as parts are 2, 2, 1 and 0."""
    smallest = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if type(placement) is Shard and placement.dim < len(smallest):
            size, number = smallest[placement.dim], spec.mesh.size(axis)
            smallest[placement.dim] = max(0, size - -(-size // number) * (number - 1))
    return 0 in smallest and 0 not in spec.shape
