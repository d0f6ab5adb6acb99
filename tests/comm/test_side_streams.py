"""``SideStream`` on a device, with a stub in the place of the device's module: what is asked of which stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vescale.comm import SideStream

Call = tuple[Any, ...]


class Stream:
    stream_id = 0

    def __init__(self, calls: list[Call], name: str) -> None:
        self.calls, self.name = calls, name

    def wait_stream(self, other: Stream) -> None:
        self.calls.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self.calls.append((self.name, "waits for", event))

    def record_event(self) -> str:
        return f"event of {self.name}"


class Device:
    """What ``torch.get_device_module`` gives: one current stream, and new ones."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_streams = 0
        self.current = Stream(self.calls, "compute")

    def Stream(self, device: int, priority: int) -> Stream:
        self.num_streams += 1
        return Stream(self.calls, f"side {priority} of {device}")

    def current_device(self) -> int:
        return 3

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    stream, other = (SideStream(torch.device("xpu", 0), "one", urgent=urgent) for urgent in (True, False))
    assert stream.is_real and stream.stream.name == "side -1 of 0" and other.stream.name == "side 0 of 0"
    with stream():
        assert device.current is stream.stream
        assert stream.compute_done() == "event of side -1 of 0"  # the current stream, whichever that is
    assert device.current.name == "compute"
    assert (stream.done(), stream.compute_done()) == ("event of side -1 of 0", "event of compute")
    stream.wait_for_compute()
    stream.wait_event(None)
    stream.wait_event("e")
    stream.compute_waits(None)
    stream.compute_waits("f")
    assert device.calls == [
        ("side -1 of 0", "waits for", "compute"),
        ("side -1 of 0", "waits for", "e"),
        ("compute", "waits for", "f"),
    ]


def test_a_device_has_one_stream_for_each_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many objects ask for it."""
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    streams = [
        SideStream(torch.device("xpu", *index), name).stream for _ in range(3) for index in ((), (4,)) for name in "ab"
    ]
    assert device.num_streams == 4 and len(set(map(id, streams))) == 4
    assert streams[0].name == "side -1 of 3"


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_nothing_without_streams(kind: str) -> None:
    stream = SideStream(torch.device(kind), "one")
    assert not stream.is_real and stream.done() is None and stream.compute_done() is None
    stream.wait_for_compute()
    stream.wait_event(None)
    stream.compute_waits(None)
    with stream():
        pass
