"""The device table: what ``torch.accelerator`` and the modules of devices lack, by the type of device."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

WITH_LOWER_RIGHT_MASKS = ("cuda", "xpu")
"""Attention kernels support a causal mask that is aligned to the last key, without materializing it."""


def accelerator_module() -> Any:
    """The module of the accelerator (``torch.xpu``, say) where at least one device is there; None: there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device.type)


def running_accelerator() -> Any:
    """The module of the accelerator that this process has begun to use; None: it uses none."""
    module = accelerator_module()
    return module if module is not None and getattr(module, "is_initialized", module.is_available)() else None


def is_capturing() -> bool:
    """Whether what the current stream is given becomes part of a graph, to be replayed."""
    capturing = getattr(running_accelerator(), "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def synchronize() -> None:
    """Wait for the current device of the accelerator, if there is one."""
    if accelerator_module() is not None:
        torch.accelerator.synchronize()


def _type() -> str:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    return device.type


def random_states() -> dict[str, torch.Tensor]:
    """By type of device: the state of the default generator of the accelerator's current device, where one is used."""
    module = running_accelerator()
    return {} if module is None else {_type(): module.get_rng_state()}


def set_random_states(states: Mapping[str, torch.Tensor]) -> None:
    """Set those of the accelerator that is there."""
    module = accelerator_module()
    if module is not None and _type() in states:
        module.set_rng_state(states[_type()])


def default_generator_of(device: torch.device) -> torch.Generator | None:
    """Of an accelerator's device; None where its module tells none."""
    module = torch.get_device_module(device.type)
    if not hasattr(module, "default_generators"):
        return None
    index = device.index if device.index is not None else module.current_device()
    module.init()
    found: torch.Generator = module.default_generators[index]
    return found


# Settings of the process, which kernels read


def _precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # of some backends only
        return None


def _set_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (_deterministic, _set_deterministic),
    (_precision, _set_precision),
    _attribute(torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),  # on every device
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _attribute(torch.backends.mkldnn, "enabled"),
)


class Settings:
    """Those of the process as they are now, apart from autocast."""

    def __init__(self) -> None:
        self._values = [read() for read, _ in _SETTINGS]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, they are so again."""
        pairs = zip(_SETTINGS, self._values, strict=True)
        others = [(put, value, now) for (read, put), value in pairs if (now := read()) != value]
        try:
            for put, value, _ in others:
                put(value)
            yield
        finally:
            for put, _, now in others:
                put(now)


# Memory


def pin(image: torch.Tensor) -> bool:
    """Register memory of the host with the accelerator's driver, whose copies then need no buffer of its own. Returns
    whether that was done; :func:`unpin` undoes it, before the memory goes."""
    module = running_accelerator()
    if module is None or not hasattr(module, "cudart"):
        return False
    return int(module.cudart().cudaHostRegister(image.data_ptr(), image.nbytes, 0)) == 0


def unpin(image: torch.Tensor) -> None:
    """Undo :func:`pin`."""
    module = accelerator_module()
    module.check_error(module.cudart().cudaHostUnregister(image.data_ptr()))


def memory_pool(device: torch.device, allocator: Any) -> Any:
    """A pool of memory on another allocator; None where such devices have none."""
    pool = getattr(torch.get_device_module(device.type), "MemPool", None)
    return None if pool is None else pool(allocator)


def use_memory_pool(device: torch.device, pool: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, memory comes from ``pool``; None: as always."""
    return contextlib.nullcontext() if pool is None else torch.get_device_module(device.type).use_mem_pool(pool)


# Scripts


def modules_of_scripts() -> list[tuple[str, Any]]:
    """The types of devices that scripts name, and their modules: of accelerators that this build of torch knows, also where
    there is no such device."""
    known = {"cuda": torch.cuda, "xpu": torch.xpu}
    device = torch.accelerator.current_accelerator()
    if device is not None:
        known[device.type] = torch.get_device_module(device.type)
    return list(known.items())
