"""``Lane`` on a device, with a stub in the place of the device's module: what is asked of which stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vescale.fsdp._lanes import Lane

Call = tuple[Any, ...]


class Stream:
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
        self.current = Stream(self.calls, "compute")

    def Stream(self, priority: int) -> Stream:
        return Stream(self.calls, f"lane {priority}")

    def current_stream(self) -> Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


def test_a_lane_is_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    lane, other = Lane(torch.device("cuda", 0)), Lane(torch.device("cuda", 0), urgent=False)
    assert lane.is_stream and lane.stream.name == "lane -1" and other.stream.name == "lane 0"
    with lane():
        assert device.current is lane.stream
        assert lane.compute_done() == "event of lane -1"  # the current stream, whichever that is
    assert device.current.name == "compute"
    assert (lane.done(), lane.compute_done()) == ("event of lane -1", "event of compute")
    lane.wait_for_compute()
    lane.wait_event(None)
    lane.wait_event("e")
    lane.compute_waits(None)
    lane.compute_waits("f")
    assert device.calls == [
        ("lane -1", "waits for", "compute"),
        ("lane -1", "waits for", "e"),
        ("compute", "waits for", "f"),
    ]


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_lane_is_nothing_without_streams(kind: str) -> None:
    lane = Lane(torch.device(kind))
    assert not lane.is_stream and lane.done() is None and lane.compute_done() is None
    lane.wait_for_compute()
    lane.wait_event(None)
    lane.compute_waits(None)
    with lane():
        pass
