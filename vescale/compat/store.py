"""The key-value store that the ranks met in, for messages that must not be collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

__all__ = ["default_store", "default_timeout", "is_alone", "own_connection"]


def default_store() -> dist.Store:
    """The default process group's store."""
    return c10d._world.pg_map[c10d._get_default_group()][1]


def own_connection() -> dist.Store:
    """The same store over a connection of its own: a thread that waits for a key keeps others from using its connection."""
    store: Any = default_store()
    return store.clone()


def default_timeout() -> timedelta:
    """How long the default group's backend waits for other ranks."""
    backend = c10d._world.pg_map[c10d._get_default_group()][0]
    return c10d._get_default_timeout(dist.Backend(backend))


def is_alone() -> bool:
    """Whether the other ranks do not exist: one rank of a large job is tried out on the ``fake`` backend."""
    return dist.get_backend() == "fake"
