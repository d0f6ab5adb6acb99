"""What is remembered of sharding decisions: PyTorch's cache, and the C++ dispatcher's tables with their specs."""

from __future__ import annotations

from typing import Any

from torch._C import _clear_DTensor_sharding_propagator_cache
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from vescale import csrc

__all__ = ["INTERNED_SPECS", "MADE_SPECS", "clear_sharding_caches", "make_room"]

# Equal specs of one mesh object, by mesh and spec: calls are compared by the address of the one that is kept. Other meshes
# that are equal may belong to destroyed process groups.
INTERNED_SPECS: dict[tuple[Any, ...], DTensorSpec] = {}
# The same for specs that vescale makes, by what they are made from.
MADE_SPECS: dict[tuple[Any, ...], DTensorSpec] = {}
# More specs than this clear all caches: programs with ever new sizes do not grow.
MAX_SPECS = 8192


def clear_sharding_caches() -> None:
    """Decide every call anew. PyTorch's cache belongs to the calling thread: those of other threads stay."""
    _clear_DTensor_sharding_propagator_cache()
    INTERNED_SPECS.clear()
    MADE_SPECS.clear()
    dispatcher = csrc.load_module("dispatch")
    if dispatcher is not None:
        dispatcher.clear()


def make_room(table: dict[tuple[Any, ...], DTensorSpec]) -> None:
    """Clear all caches if the table of specs is full."""
    if len(table) >= MAX_SPECS:
        clear_sharding_caches()
