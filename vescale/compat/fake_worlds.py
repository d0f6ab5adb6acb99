"""A default process group of ``world_size`` ranks that do not exist, beside the one that this process may have."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from vescale.compat.needed_names import ESTIMATES
from vescale.compat.needs import require
from vescale.compat.patching import Changes, undo
from vescale.compat.sharding_caches import clear_sharding_caches

require(ESTIMATES)  # this module is no part of what vescale imports at first
from torch._C._distributed_c10d import _unregister_process_group  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

__all__ = ["fake_world"]


class _World(c10d._World):
    """The state of ``torch.distributed``, apart from that of the process."""

    pg_map: Any = property(lambda self: self.own["pg_map"])
    pg_names: Any = property(lambda self: self.own["pg_names"])
    pg_group_ranks: Any = property(lambda self: self.own["pg_group_ranks"])
    pg_backend_config: Any = property(lambda self: self.own["pg_backend_config"])
    tags_to_pg: Any = property(lambda self: self.own["tags_to_pg"])
    pg_to_tag: Any = property(lambda self: self.own["pg_to_tag"])

    def __init__(self, first_number: int) -> None:
        super().__init__()
        tables = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
        self.own: dict[str, dict[Any, Any]] = {name: {} for name in tables}
        self._number = first_number

    @property
    def group_count(self) -> int:
        return self._number

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._number = value


# Names of groups are numbers, of which a process has one set: those of fake worlds are far from those of real ones.
_FIRST_NUMBER = 1 << 40
# The state of torch.distributed is the process's: one fake world at a time.
_LOCK = threading.RLock()


@contextlib.contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Inside, this process is ``rank`` of ``world_size``: collectives return at once, and leave their outputs as they are.

    The process's own default group, if there is one, is there again afterwards, with the groups made of it; its meshes must
    not be used inside. Sharding decisions, which PyTorch remembers with a mesh that equals others, are forgotten before and
    after. Other threads that enter a fake world wait; none may use ``torch.distributed`` meanwhile.
    """
    with _LOCK:
        world, changes = _World(_FIRST_NUMBER), Changes()
        clear_sharding_caches()
        changes.attribute(c10d, "_world", world)
        changes.attribute(sys, "excepthook", sys.excepthook)  # init_process_group puts the rank before each line of it
        try:
            dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
            yield
        finally:
            for name in set(world.pg_names.values()):
                with contextlib.suppress(RuntimeError):
                    _unregister_process_group(name)
            undo(changes)
            clear_sharding_caches()
