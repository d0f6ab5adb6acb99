"""What is remembered of sharding decisions: PyTorch's caches, and the C++ dispatcher's tables with their specs.

All are forgotten when there are too many of them, and when rules change.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch.distributed as dist
from torch._C import _clear_DTensor_sharding_propagator_cache
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from vescale import csrc
from vescale.compat.meta_shapes import forget_metas

# Equal specs of one mesh object: calls are compared by the address of the one that is kept. Other meshes that are equal may
# belong to destroyed process groups.
INTERNED_SPECS: dict[tuple[Any, ...], DTensorSpec] = {}
# The same for specs that vescale makes, by what they are made from.
MADE_SPECS: dict[tuple[Any, ...], DTensorSpec] = {}
# Results of ops on operands that are all Replicate, by op, specs, the meshes' identities and arguments.
REPLICAS: dict[tuple[Any, ...], tuple[DTensorSpec, ...]] = {}
# More specs than this, and all sizes are forgotten: programs with ever new sizes do not grow.
MAX_SPECS = 16384

# Default groups that decisions were made under.
_WORLDS: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_LOCK = threading.Lock()


def begin_world() -> None:
    """Forget what was remembered under other default groups than today's; does nothing when that has been done.

    PyTorch's caches compare meshes by value. After ``destroy_process_group()``, a mesh of the new world may equal one of the
    old world, whose groups are gone, and in which this process may have been another rank.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or world in _WORLDS:
        return
    with _LOCK:
        _WORLDS.add(world)
        forget_decisions()


def clear_sharding_caches() -> None:
    """Decide every call anew, and find the shapes of results anew."""
    forget_decisions()
    forget_metas()


def forget_decisions() -> None:
    """Decide every call anew. PyTorch's caches belong to the calling thread: those of other threads stay."""
    _clear_DTensor_sharding_propagator_cache()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    redistribution._gen_transform_infos.cache_clear()
    redistribution.clear_redistribute_planner_cache()
    INTERNED_SPECS.clear()
    MADE_SPECS.clear()
    REPLICAS.clear()
    dispatcher = csrc.dispatcher()
    if dispatcher is not None:
        dispatcher.clear()


def make_room(table: dict[tuple[Any, ...], DTensorSpec]) -> None:
    """Forget all decisions if the table of specs is full."""
    if len(table) >= MAX_SPECS:
        forget_decisions()
