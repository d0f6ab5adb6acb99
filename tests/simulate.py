"""Many ranks as threads of this process: the real code on meshes that no test machine has processes for.

PyTorch's threaded process group gives every thread its own ``torch.distributed`` state and moves data through shared
memory. It is for logic, not for timing: threads take turns.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.torch_version import TorchVersion

from tests.simulated_messages import Messages

__all__ = ["SimulationError", "on_other_thread", "simulate"]

_ONE_AT_A_TIME = threading.Lock()  # the threaded world is a global of torch.distributed


class SimulationError(AssertionError):
    """``fn`` failed on at least one simulated rank; the message holds the traceback of each."""


def simulate(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``fn(*args)`` on ``world_size`` simulated ranks; the results in rank order.

    Raises :class:`SimulationError` when a rank raises or does not answer within ``timeout`` seconds. The other ranks
    are then told to leave their collectives.
    """
    assert not dist.is_initialized(), "this process already has a process group; simulate() brings its own"
    # Ranks would compare steps in messages for which nobody waits, but each collective of these threads waits for all.
    settings = {"VESCALE_CHECK": os.environ.get("VESCALE_CHECK", "off")}
    # In each fake mode PyTorch 2.11 replaces what other threads use, where it was built for a device that is not there.
    once = TorchVersion(torch.__version__) < "2.12"
    guard = mock.patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None) if once else nullcontext()
    with _ONE_AT_A_TIME, mock.patch.dict(os.environ, settings), guard:
        return _simulate(fn, world_size, args, timeout)


def _simulate(fn: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
    results: list[Any] = [None] * world_size
    failures: dict[int, str] = {}
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
            results[rank] = fn(*args)
        except BaseException as error:
            if not isinstance(error, SystemExit):  # raised in the ranks that wait for a failed one
                failures[rank] = traceback.format_exc()
            messages.give_up()
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    messages = Messages(threaded.ProcessLocalGroup)
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for rank, thread in enumerate(threads):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                failures.setdefault(rank, f"no answer within {timeout} s\n")
                messages.give_up()
                threaded.ProcessLocalGroup.exception_handle(TimeoutError())
        for thread in threads:
            thread.join(5.0)
    finally:
        messages.uninstall()
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if failures:
        parts = [f"--- simulated rank {rank} of {world_size}:\n{text}" for rank, text in sorted(failures.items())]
        raise SimulationError("\n".join(["", *parts]))
    return results


def on_other_thread(fn: Callable[[], Any]) -> Any:
    """``fn()`` on a new thread, which has the process groups of the calling rank if that is a simulated one."""
    is_simulated = isinstance(dist.distributed_c10d._world, threaded.ThreadLocalWorld)
    world = dist.distributed_c10d._world._get_world() if is_simulated else None
    failed: list[BaseException] = []
    found: list[Any] = []

    def run() -> None:
        if world is not None:
            threaded.ThreadLocalWorld._world.world = world
            for group, name in world.pg_names.items():
                torch._C._distributed_c10d._register_process_group(name, group)
        try:
            found.append(fn())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]
