"""Calls of one function in processes of their own, on hosts with several cores."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["each", "number_of_processes"]

_MOST = 4
_CALL: list[Callable[[Any], Any]] = []
_ITEMS: list[Any] = []


def each(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """``function`` of each item, in order; results are pickled.

    The processes are forks of this one, which has loaded the model: only where nothing else runs in it (threads, a process
    group, a GPU's context), else the calls are made here, one after the other.
    """
    number = min(len(items), number_of_processes())
    if number < 2:
        yield from map(function, items)
        return
    _CALL[:], _ITEMS[:] = [function], items
    try:
        with ProcessPoolExecutor(number, multiprocessing.get_context("fork"), initializer=_begin) as pool:
            yield from pool.map(_call, range(len(items)))
    finally:
        _CALL.clear()
        _ITEMS.clear()


def number_of_processes() -> int:
    """How many calls :func:`each` makes at once."""
    is_alone = threading.active_count() == 1 and not dist.is_initialized() and not torch.cuda.is_initialized()
    if not is_alone or "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, _MOST)


def _begin() -> None:
    torch.set_num_threads(1)  # threads of the parent are not there


def _call(number: int) -> Any:
    return _CALL[0](_ITEMS[number])
