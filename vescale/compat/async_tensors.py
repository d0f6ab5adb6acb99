"""Asynchronous collective tensors: functional collectives' lazy result, for work of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import _register_work
from torch._guards import detect_fake_mode
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor

from vescale.compat.devices import memory_pool

# Renamed in 2.13; the older names warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def backend_memory_pool(group: dist.ProcessGroup, device: torch.device) -> Any:
    """A memory pool on the allocator of the group's backend for ``device``; None when the backend has none."""
    backend = group._get_backend(device)
    supports = getattr(backend, "supports_tensor_alloc", None)
    if supports is None or not supports(device):
        return None
    return memory_pool(device, backend.mem_allocator)


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for one of a program that is being traced (``torch.compile``), and holds no numbers."""
    if type(tensor) is torch.Tensor and not _len_torch_dispatch_stack():
        return False
    return detect_fake_mode(tensor) is not None


def traced_all_to_all(
    send: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """An uneven all-to-all as the functional operators that tracers know, with its wait in the graph."""
    return wait_tensor(all_to_all_single(send, list(receive_sizes), list(send_sizes), group))


class _Waitable(Protocol):
    def wait(self) -> torch.Tensor: ...
    def is_completed(self) -> bool: ...


class _PendingWork(dist._Work):
    """Lets ``wait_tensor`` finish a collective together with the local steps that follow it."""

    def __init__(self, pending: _Waitable) -> None:
        super().__init__()
        self._pending: _Waitable | None = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return True

    def is_completed(self) -> bool:
        return self._pending is None or self._pending.is_completed()


# Results that nobody has waited for yet. A result that is dropped unused would stay here, and its memory with it, so
# finished ones are taken out when there are many.
_IN_FLIGHT: list[_PendingWork] = []
_MANY_IN_FLIGHT = 16


def as_async_tensor(out: torch.Tensor, pending: _Waitable) -> torch.Tensor:
    """A tensor over ``out`` that calls ``pending.wait()`` on first use, as functional collectives' results do."""
    if is_traced(out):
        return pending.wait()
    if len(_IN_FLIGHT) >= _MANY_IN_FLIGHT:
        for work in tuple(_IN_FLIGHT):
            if work.is_completed():
                work.wait()
                with contextlib.suppress(ValueError):  # another thread has taken it out
                    _IN_FLIGHT.remove(work)
    work = _PendingWork(pending)
    _IN_FLIGHT.append(work)
    _register_work(out, work)
    # PyTorch's registry holds the C++ half only, by storage, and views of the tensor outlive the tensor: the Python
    # half must live as long as the storage. (The circle through ``pending.out`` ends with ``wait``.)
    out.untyped_storage()._vescale_work = work  # type: ignore[attr-defined]
    return AsyncCollectiveTensor(out)
