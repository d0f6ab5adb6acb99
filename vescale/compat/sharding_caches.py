"""What is remembered of sharding decisions: PyTorch's cache, and the C++ dispatcher's tables with their specs."""

from __future__ import annotations

from typing import Any

from torch._C import _clear_DTensor_sharding_propagator_cache
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from vescale import csrc

__all__ = ["INTERNED_SPECS", "clear_sharding_caches"]

# Equal specs of one mesh object, by mesh and spec: calls are compared by the address of the one that is kept. Other meshes
# that are equal may belong to destroyed process groups.
INTERNED_SPECS: dict[tuple[Any, ...], DTensorSpec] = {}


def clear_sharding_caches() -> None:
    """Decide every call anew. PyTorch's cache belongs to the calling thread: those of other threads stay."""
    _clear_DTensor_sharding_propagator_cache()
    INTERNED_SPECS.clear()
    dispatcher = csrc.load_module("dispatch")
    if dispatcher is not None:
        dispatcher.clear()
