"""What the stages of a pipeline have to refresh, so that all of them plan the schedule that one device has."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from vescale.comm import wait_limit
from vescale.compat import default_store, default_timeout, without_modes
from vescale.errors import OptimizerParameterError

__all__ = ["Entry", "entries_of_all_stages"]

Entry = tuple[int, int, int]
"""Number of a group, place of a parameter in the whole model, number of a matrix in the parameter: the order in which one
device has matrices."""

_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def entries_of_all_stages(
    kind: str, group: dist.ProcessGroup, own: Mapping[Entry, tuple[int, int]]
) -> dict[Entry, tuple[int, int]]:
    """``own`` of all ranks of ``group``, which call this, in the order of one device; through the store.

    Raises ValueError if one of them does not come in time.
    """
    ranks = sorted(dist.get_process_group_ranks(group))
    name = f"vescale schedule {kind} {hashlib.sha256(str(ranks).encode()).hexdigest()[:16]}"
    with _LOCK:
        number = next(_COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(name, itertools.count()))
    keys = {f"{name} {number} {rank}": rank for rank in ranks}
    with without_modes():
        store, limit = default_store(), wait_limit() or default_timeout()
        store.set(f"{name} {number} {dist.get_rank()}", json.dumps([[*entry, *what] for entry, what in own.items()]))
        try:
            store.wait(list(keys), limit)
        except RuntimeError:  # store types have no common error class; a lost store raises again here
            late = [rank for key, rank in keys.items() if not store.check([key])]
            if late:
                raise OptimizerParameterError(
                    f"{kind} plans in which steps matrices are due over all stages of the model, and ranks {late} did not "
                    f"come within {limit}. All stages must make the optimizer, and add groups to it (with no parameters "
                    'where they have none: {"params": []}); or give stagger=False, with which all matrices are due together'
                ) from None
        found = [row for key in keys for row in json.loads(store.get(key))]
    return dict(sorted({(g, place, block): (cost, frequency) for g, place, block, cost, frequency in found}.items()))
