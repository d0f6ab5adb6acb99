"""The device that the tests run on: ``pytest --device=sim``."""

from __future__ import annotations

import os
from typing import Any

from torch.utils._device import DeviceContext, _device_constructors

__all__ = ["DefaultDevice", "device_type", "set_device_type"]

_NAME = "VESCALE_TEST_DEVICE"


def device_type() -> str:
    """The type of the device that a test's tensors and meshes are on, for ranks as for the test process."""
    return os.environ.get(_NAME, "cpu")


def set_device_type(name: str) -> None:
    """Also of the processes that are started from now on."""
    os.environ[_NAME] = name


class DefaultDevice(DeviceContext):
    """``with DefaultDevice(torch.device("sim")):`` as ``torch.device`` does it, but for values that a generator of the CPU
    draws: they are drawn there, and copied."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if (
            generator is None
            or generator.device.type != "cpu"
            or kwargs.get("device")
            or func not in _device_constructors()
        ):
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(self.device)
