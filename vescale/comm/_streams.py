"""``SideStream``: a stream beside the computation's, and nothing at all on the CPU. ``HostCopy``: what the host reads of a
device without holding it up. ``DeviceWait``: whether a thread waits for the device."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from typing import Any

import torch

from vescale.comm._long_waits import LONG_WAIT_SECONDS
from vescale.compat.devices import running_accelerator


class SideStream:
    """Work that a device does beside its computation.

    On the CPU there are no streams: collectives run on the backend's threads, and the methods do nothing.

    Args:
        name: of what it is for. A device has one stream for each name and urgency, however many objects ask for it: pools
            of streams are small, and memory is cached for each.
        urgent: of high priority.
    """

    def __init__(self, device: torch.device, name: str, *, urgent: bool = True) -> None:
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device.type)
        self.stream: Any = None
        if self._module:
            index = device.index if device.index is not None else self._module.current_device()
            self.stream = _stream(device.type, index, name, -1 if urgent else 0)
            _SIDE[device.type, index, self.stream.stream_id] = self.stream
        self.is_real = self._module is not None
        """Whether there is a stream."""

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        """Run what follows on this stream."""
        return self._module.stream(self.stream) if self._module else contextlib.nullcontext()

    def wait_for_compute(self) -> None:
        """Start later work only after all that the current stream has been given."""
        if self._module:
            self.stream.wait_stream(self._module.current_stream())

    def wait_event(self, event: Any) -> None:
        if self._module and event is not None:
            self.stream.wait_event(event)

    def done(self) -> Any:
        """An event after all that this stream has been given; None on the CPU."""
        return self.stream.record_event() if self._module else None

    def host_waits(self, event: Any) -> None:
        """The caller waits for ``event``."""
        if self._module and event is not None:
            event.synchronize()

    def compute_done(self) -> Any:
        """An event after all that the current stream has been given; None on the CPU."""
        return self._module.current_stream().record_event() if self._module else None

    def compute_waits(self, event: Any) -> None:
        """The current stream goes on only after ``event``."""
        if self._module and event is not None:
            self._module.current_stream().wait_event(event)


def is_beside(tensor: torch.Tensor) -> bool:
    """Whether a collective that starts now runs beside the current stream. On a :class:`SideStream` it is a part of that,
    which nothing that is lost with an exception has to wait for."""
    if tensor.device.type in ("cpu", "meta"):
        return True
    stream = torch.accelerator.current_stream(tensor.device)
    return (tensor.device.type, stream.device_index, stream.stream_id) not in _SIDE


class HostCopy:
    """The values of a tensor, for the host. Of a device's tensor it is a copy, which comes after all that the current stream
    has been given, and which the host does not wait for until it reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values = tensor
        self._event: Any = None
        if tensor.device.type != "cpu":
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.get_device_module(tensor.device.type).Event()
            self._event.record()

    def is_there(self) -> bool:
        """Whether :meth:`read` returns at once."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def read(self) -> torch.Tensor:
        if not self.is_there():
            self._event.synchronize()
        return self._values


class DeviceWait:
    """Whether the thread that makes it waits for its device of the accelerator: another thread asks, from time to time.

    The device is asked only while the thread stays in one call: a graph that the thread captures must not be disturbed.
    """

    def __init__(self) -> None:
        self.thread, self._index = threading.get_ident(), 0
        self._module: Any = None
        self._at: tuple[int, int] | None = None
        self._since = 0.0
        self._events: list[Any] = []

    def see_device(self) -> None:
        """The device that the thread has begun to use by now, if it is the one that has made this."""
        if self._module is None and threading.get_ident() == self.thread:
            self._module = running_accelerator()
            self._index = torch.accelerator.current_device_index() if self._module is not None else 0

    def is_long(self) -> bool:
        """Whether it has been in one call for long, while the device has not ended what it was given before."""
        frame = sys._current_frames().get(self.thread)
        at, now = None if frame is None else (id(frame), frame.f_lasti), time.monotonic()
        if at != self._at:
            self._at, self._since, self._events = at, now, []
        if self._module is None or at is None or now - self._since < LONG_WAIT_SECONDS:
            return False
        with contextlib.suppress(RuntimeError):  # the device has failed: the thread's own call says so
            if self._events:
                return not all(event.query() for event in self._events)
            streams = [self._module.current_stream(self._index), *_SIDE.values()]
            self._events = [stream.record_event() for stream in streams]
        return False


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of values of the host; the host does not wait for the device."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


_SIDE: dict[tuple[str, int, int], Any] = {}


@functools.cache
def _stream(device_type: str, index: int, name: str, priority: int) -> Any:
    return torch.get_device_module(device_type).Stream(device=index, priority=priority)
