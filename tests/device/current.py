"""The device that the tests run on: ``pytest --device=sim``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._pytree import tree_map

__all__ = ["default_device", "device_type", "everywhere", "on_cpu", "runs_everywhere", "set_device_type"]

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


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """A part of a case that is about the CPU, also where the rest of the tests run on the simulated device."""
    before = os.environ.get(_NAME, "cpu")
    set_device_type("cpu")
    try:
        with torch.device("cpu"):
            yield
    finally:
        set_device_type(before)


@contextlib.contextmanager
def default_device(device: torch.device) -> Iterator[None]:
    """``with device:``, but for values that a generator of the CPU draws: they are drawn there, and copied."""
    own = DeviceContext.__torch_function__

    def function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if (
            generator is None
            or generator.device.type != "cpu"
            or kwargs.get("device")
            or func not in _device_constructors()
        ):
            return own(self, func, types, args, kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(self.device)

    # Reports that name a line of the program leave this one out, as they do PyTorch's own.
    function.__code__ = function.__code__.replace(co_filename=own.__code__.co_filename)
    with mock.patch.object(DeviceContext, "__torch_function__", function), device:
        yield


def everywhere(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run on a rank of the simulated device: ``function(*args)`` with it as the default device, and as that of the test's
    meshes. Races are recorded and not raised: an error in the middle of a step would leave the other ranks waiting."""
    sim, before = torch.get_device_module("sim"), os.environ.get(_NAME, "cpu")
    set_device_type("sim")
    raised = sim.set_raises(False)
    try:
        with default_device(torch.device("sim")):
            found = function(*args, **kwargs)
        # The test process has tensors on the CPU.
        return tree_map(lambda x: x.cpu() if type(x) is torch.Tensor else x, found)
    finally:
        sim.set_raises(raised)
        set_device_type(before)
