"""What requires gradients behind a stage, where the host is ahead of its device."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate

from vescale.pipeline import _headers
from vescale.pipeline._headers import Header, HeaderExchange, Needs

HEADERS = [
    Header((4,), (1,), (4,), (Replicate(),), torch.float32, True),
    Header((4,), (1,), (4,), (Replicate(),), torch.int64, False),
]


class Reads:
    """Flags on a device: when they are read, the host may have to wait."""

    found: list[int] = []  # noqa: RUF012

    def __init__(self, flags: torch.Tensor) -> None:
        self.number, self.flags = int(flags[2]), flags[:2]

    def is_there(self) -> bool:
        return False

    def read(self) -> torch.Tensor:
        Reads.found.append(self.number)
        return self.flags


def test_gradients_that_are_needed_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes, and none comes for long that is not needed. The host reads the flags of the step itself only where
    a tensor does not need gradients that may."""
    monkeypatch.setattr(_headers, "HostCopy", Reads)
    for steps in itertools.product((True, False), repeat=7):
        needs = Needs()
        for step, needed in enumerate(steps):
            Reads.found.clear()
            needs.follow(torch.tensor([needed, False, step]), HEADERS, at_once=False)
            assert needs.now is not None and needs.now[0] >= needed and not needs.now[1], steps
            if step >= 2 and not steps[step - 2]:
                assert needs.now[0] == needed, steps
            if step >= 2 and all(steps[: step + 1]):
                assert Reads.found == [step - 2], steps


def test_flags_travel_with_the_first_message_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store is asked after the first step; on a CPU they are known at once."""
    posts: dict[str, str] = {}
    monkeypatch.setattr(_headers, "post", posts.__setitem__)
    monkeypatch.setattr(_headers, "read_post", posts.__getitem__)
    sender, receiver = HeaderExchange("here"), HeaderExchange("here")
    for needed in (True, True, False, True):
        for exchange in (sender, receiver):
            exchange.begin_step()
        headers = [replace(HEADERS[0], requires_grad=needed), HEADERS[1]]
        sender.tell(1, headers, follows=True)
        assert receiver.get(1) is not None
        (sent,), (received,) = sender.message(1), receiver.message(1)
        assert sender.message(1) == receiver.message(1) == []
        arrived = [torch.ones(4), torch.ones(4), received.copy_(sent)]
        assert receiver.of_arrived(1, arrived) == tuple(headers) and len(arrived) == 2
        assert list(sender.returned(1)) == [needed, False] and len(posts) == 1
