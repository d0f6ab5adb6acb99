"""``torch.sim``: what a device's module has to offer, as ``torch.get_device_module`` finds it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from tests.device._build import load

__all__ = ["BACKEND", "DEVICE", "register"]

DEVICE = "sim"
BACKEND = "simccl"


class Stream(torch.Stream):
    """``torch.sim.Stream(priority=-1)``: a stream that nobody else is given."""

    def __new__(cls, device: Any = None, priority: int = 0, **others: Any) -> Stream:
        if not others:
            return super().__new__(cls, device=torch.device(DEVICE, 0), priority=priority)
        return super().__new__(cls, **others)


class Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(
            cls, device=DEVICE, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
        )


class StreamContext:
    """``with torch.sim.stream(stream):``; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            self._before.append(current_stream())
            torch.accelerator.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            torch.accelerator.set_stream(self._before.pop())


class device:
    """``with torch.sim.device(index):``; there is one device, of index 0."""

    def __init__(self, index: Any) -> None:
        index = torch.device(index).index if isinstance(index, (str, torch.device)) else index
        set_device(index or 0)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


_initialized = True
"""As ``torch.cuda`` has it: checkpoints put back the state of generators only where they find this."""


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: Any) -> None:
    index = torch.device(index).index if isinstance(index, (str, torch.device)) else index
    if index not in (None, 0):
        raise RuntimeError(f"the simulated device has index 0 alone, not {index}")


def current_stream(device: Any = None) -> Stream:
    now = torch.accelerator.current_stream()
    return Stream(stream_id=now.stream_id, device_index=now.device_index, device_type=now.device_type)


def default_stream(device: Any = None) -> Stream:
    return Stream(stream_id=0, device_index=0, device_type=torch.accelerator.current_stream().device_type)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize()


def empty_cache() -> None: ...


def memory_stats(device: Any = None) -> dict[str, int]:
    return load().stats()


def memory_allocated(device: Any = None) -> int:
    return load().stats()["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return load().stats()["peak"]


def memory_reserved(device: Any = None) -> int:
    return load().stats()["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    return load().stats()["peak_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = load().get_limit() or 8 << 30
    return total - memory_allocated(), total


def set_memory_limit(size: int | None) -> None:
    """Allocations above ``size`` bytes raise ``torch.OutOfMemoryError``; None: no limit."""
    load().set_limit(size or 0)


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="simulated device", total_memory=mem_get_info()[1], multi_processor_count=1)


def get_device_name(device: Any = None) -> str:
    return "simulated device"


def manual_seed(seed: int) -> None:
    default_generator().manual_seed(seed)


manual_seed_all = manual_seed


def seed() -> None:
    default_generator().seed()


def initial_seed() -> int:
    return default_generator().initial_seed()


def default_generator() -> torch.Generator:
    return sys.modules[f"torch.{DEVICE}"].default_generators[0]


def get_rng_state(device: Any = None) -> torch.Tensor:
    return default_generator().get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    default_generator().set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None: ...


def races() -> list[str]:
    """The races found since :func:`clear`, also those that were noticed where nothing can be raised."""
    return load().races()


def clear() -> None:
    """Forget races and counts."""
    load().clear()


def counts() -> dict[str, Any]:
    """``host_syncs``, ``segments`` (fresh memory), ``communicators`` and ``launches`` since :func:`clear`: how many of each,
    and how many at which place (of launches: of which op)."""
    return load().counts()


def set_raises(raises: bool) -> bool:
    """Whether races raise where they are found, or are only recorded; returns what was so before."""
    return load().set_raises(raises)


def num_syncs() -> int:
    """How often the host has waited for the device since :func:`clear`."""
    return load().num_syncs()


def checked_pairs() -> int:
    """How many pairs of uses of the same bytes were compared since :func:`clear`."""
    return load().checked_pairs()


@contextlib.contextmanager
def recorded_races() -> Iterator[list[str]]:
    """Races do not raise in here, and are in the list afterwards; those of before stay out of it."""
    module = load()
    before = len(module.races())
    raised = module.set_raises(False)
    found: list[str] = []
    try:
        yield found
    finally:
        found.extend(module.races()[before:])
        module.set_raises(raised)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """What makes the host wait raises in here, as while a graph is captured."""
    load().capture(True)
    try:
        yield
    finally:
        load().capture(False)


def is_current_stream_capturing() -> bool:
    return load().is_capturing()


OutOfMemoryError = torch.OutOfMemoryError


def register() -> types.ModuleType:
    """Build the extension where that is still to be done, and make ``torch.sim``; a second call finds it."""
    if hasattr(torch, DEVICE):
        return getattr(torch, DEVICE)
    extension = load()
    torch.utils.rename_privateuse1_backend(DEVICE)
    extension.start()
    module = types.ModuleType(f"torch.{DEVICE}", __doc__)
    hidden = ("load", "register")
    module.__dict__.update(
        {name: value for name, value in globals().items() if name not in hidden and name[:2] != "__"}
    )
    torch._register_device_module(DEVICE, module)
    module.default_generators = (extension.default_generator(),)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if torch.distributed.is_available():
        from tests.device._group import register_backend

        register_backend()
    return module
