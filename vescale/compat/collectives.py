"""Asynchronous collective tensors: functional collectives' lazy result, for work of our own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work
from torch.distributed._functional_collectives import AsyncCollectiveTensor

__all__ = ["AsyncCollectiveTensor", "all_gather_single", "as_async_tensor", "reduce_scatter_single"]

# Renamed in 2.13; the older names warn there.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Waitable(Protocol):
    def wait(self) -> torch.Tensor: ...


class _PendingWork(dist._Work):
    """Lets ``wait_tensor`` finish a collective together with the local steps that follow it."""

    def __init__(self, pending: _Waitable) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._pending.wait()
        return True


def as_async_tensor(out: torch.Tensor, pending: _Waitable) -> torch.Tensor:
    """A tensor over ``out`` that calls ``pending.wait()`` on first use, as functional collectives' results do."""
    work = _PendingWork(pending)
    _register_work(out, work)
    lazy: Any = AsyncCollectiveTensor(out)
    lazy.vescale_work = work  # the registry holds the C++ half only; the Python half must live as long
    return lazy
