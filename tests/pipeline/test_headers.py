"""Headers of what enters a stage, where the host is ahead of its device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate

from vescale.pipeline import _headers
from vescale.pipeline._headers import Header, HeaderExchange


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_receive_that_was_waited_for_has_not_arrived_on_a_device(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The sender says that its output no longer requires gradients before it sends; the host of the receiver may be ahead of
    that, until its stream has the message."""
    posts: dict[str, str] = {}
    monkeypatch.setattr(_headers, "post", posts.__setitem__)
    monkeypatch.setattr(_headers, "posted", posts.get)
    monkeypatch.setattr(_headers, "read_post", posts.__getitem__)
    sender, receiver = HeaderExchange("here"), HeaderExchange("here")
    header = Header((4,), (1,), (4,), (Replicate(),), torch.float32, True)
    sender.tell(1, [header])
    arrived: Any = [SimpleNamespace(device=torch.device(device))]

    def sends() -> None:
        sender.tell(1, [replace(header, requires_grad=False)])

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: SimpleNamespace(synchronize=sends))
    assert receiver.of_arrived(1, [SimpleNamespace(device=torch.device("cpu"))]) == (header,)  # type: ignore[list-item]
    for exchange in (sender, receiver):
        exchange.begin_step()
    if device == "cpu":  # it has arrived
        sends()
    assert not receiver.of_arrived(1, arrived)[0].requires_grad
