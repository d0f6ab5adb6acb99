"""Process groups made by their members alone, and the key-value store that the ranks met in."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def make_group(ranks: Sequence[int], purpose: str = "") -> dist.ProcessGroup:
    """A new group of the default group's backend over sorted global ``ranks``, called by exactly those ranks.

    ``dist.new_group(use_local_synchronization=True)`` promises the same, but names the group after the *number* of
    groups that the calling rank knows; ranks that know different numbers (a pipeline stage with a mesh of its own)
    wait for each other forever. Here the name follows from the ranks and ``purpose``, so one group can be made for each
    two. A member that never comes is an error after the default group's timeout, where stock groups wait half an hour.
    """
    world = c10d._get_default_group()
    backend, store = c10d._world.pg_map[world]
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        backend,
        store,
        f"vescale ranks {'_'.join(map(str, ranks))} {purpose}".rstrip(),  # type: ignore[arg-type]  # GroupName is str at run time
        timeout=_timeout_of(world, backend),
        device_id=world.bound_device_id,
        group_desc=f"vescale {purpose}".rstrip(),
    )
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group


def first_alike(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Of the groups of this rank that have the ranks, the description and the backend of ``group``: the one made first, on
    each of its ranks, because making a group is a rendezvous."""
    ranks, world = dist.get_process_group_ranks(group), c10d._world
    own = world.pg_map[group][0]
    for other, (backend, _) in world.pg_map.items():
        if other is group:
            break
        is_alike = other is not None and backend == own and other.group_desc == group.group_desc
        if is_alike and dist.get_process_group_ranks(other) == ranks:
            return other
    return group


def exists(group: dist.ProcessGroup) -> bool:
    """Whether a group has not been destroyed."""
    return group in c10d._world.pg_map


def _timeout_of(group: dist.ProcessGroup, backend: str) -> timedelta:
    """How long a group's collectives wait; the default of the backend where it does not tell."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if found is not None:
            return timedelta(seconds=found.total_seconds())
    return c10d._get_default_timeout(dist.Backend(backend))


def message_device() -> torch.device:
    """Where small messages to other ranks are made: in the host's memory, unless the default group's backend takes that of
    accelerators only; then on the current device."""
    kinds = {device.type for device in c10d._get_default_group()._device_types}
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(min(kinds), torch.accelerator.current_device_index())


def default_store() -> dist.Store:
    """The default process group's store."""
    return c10d._world.pg_map[c10d._get_default_group()][1]


def own_connection() -> dist.Store:
    """The same store over a connection of its own: a thread that waits for a key keeps others from using its connection."""
    store: Any = default_store()
    return store.clone()


def default_timeout() -> timedelta:
    """How long the default group's collectives wait for other ranks: ``init_process_group(timeout=)``."""
    world = c10d._get_default_group()
    return _timeout_of(world, c10d._world.pg_map[world][0])


def is_alone() -> bool:
    """Whether the other ranks do not exist: one rank of a large job is tried out on the ``fake`` backend."""
    return dist.get_backend() == "fake"
