"""The process group ``simccl`` of the simulated device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.device._build import load

__all__ = ["register_backend"]


def _make(options: Any, _: Any) -> Any:
    timeout = options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    store = dist.PrefixStore("simccl", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=timeout)
    seconds = timeout.total_seconds()
    return load().make_group(options.group_rank, options.group_size, gloo, options.group_id, seconds)


def register_backend() -> None:
    dist.Backend.register_backend("simccl", _make, extended_api=True, devices="sim")
