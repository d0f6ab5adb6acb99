"""Waits in which a rank looks from time to time whether it waits in vain."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from vescale.comm import look_while_waiting
from vescale.comm._long_waits import wait_for_work


class Looks:
    looks_last = False

    def __init__(self) -> None:
        self.in_vain: list[bool] = []

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        self.in_vain.append(in_vain)


class EndsLate(dist.Work):
    """Does not end in the first slice, and ends just behind the second one; ``fails``: by an error."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails, self.num_slices = fails, 0

    def is_completed(self) -> bool:
        return self.num_slices >= 2

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.num_slices += timeout is not None
        if timeout is not None or self.fails:
            raise RuntimeError("timed out" if timeout is not None else "the process of another rank has ended")
        return True


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_behind_a_slice(fails: bool) -> None:
    """It had not failed, but was taken for it: a rank raised what its replicas had raised, and left its own shard group
    in a comparison. A process died in the step after the error."""
    looks = Looks()
    look_while_waiting(looks)
    work = EndsLate(fails)
    if fails:
        with pytest.raises(RuntimeError, match="has ended"):
            wait_for_work(work, torch.empty(1))
    else:
        wait_for_work(work, torch.empty(1))
    assert looks.in_vain == [False, True] if fails else looks.in_vain == [False]


def test_what_belongs_to_a_world_that_is_gone() -> None:
    """Who waits in a later world, or in none, is no business of it."""
    looks = Looks()
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        look_while_waiting(looks)
        wait_for_work(EndsLate(False), torch.empty(1))
        assert looks.in_vain == [False]
    finally:
        dist.destroy_process_group()
    wait_for_work(EndsLate(False), torch.empty(1))
    assert looks.in_vain == [False]
