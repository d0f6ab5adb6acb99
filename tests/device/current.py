"""The device that the tests run on: ``pytest --device=sim``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

__all__ = ["DefaultDevice", "device_type", "everywhere", "runs_everywhere", "set_device_type"]

_NAME = "VESCALE_TEST_DEVICE"


def device_type() -> str:
    """The type of the device that the tensors and meshes of a rank's case are on. Where the simulated device is not
    registered, as in the test process itself, that is the CPU."""
    name = os.environ.get(_NAME, "cpu")
    return name if hasattr(torch, name) else "cpu"


def set_device_type(name: str) -> None:
    """Also for the processes that are started from now on."""
    os.environ[_NAME] = name


def runs_everywhere() -> bool:
    """Whether ``pytest --device=sim`` was asked for."""
    return os.environ.get(_NAME, "cpu") != "cpu"


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


def everywhere(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on a rank of the simulated device: ``function(*args)`` with it as the default device, and as that of the test's
    meshes. Races are recorded and not raised: an error in the middle of a step would leave the other ranks waiting."""
    sim, before = torch.get_device_module("sim"), os.environ.get(_NAME, "cpu")
    set_device_type("sim")
    raised = sim.set_raises(False)
    try:
        with DefaultDevice(torch.device("sim")):
            return function(*args, **kwargs)
    finally:
        sim.set_raises(raised)
        set_device_type(before)
