"""Local processes of a command: one for one device, and one for each rank. All end with the command."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from vescale.errors import ProcessFailed

_PRELOAD = ("torch", "torch.distributed.tensor")


def messages(
    work: Callable[..., None], ranks: int, job: Any, *, preload: Sequence[str] = (), one_device: bool = True
) -> Generator[tuple[int, tuple[Any, ...]], None, None]:
    """Run ``work(job, rank, send)`` in a process for one device (rank -1) and in one for each rank. ``preload``: modules
    that all of them need. ``one_device``: False leaves the first out.

    Yields (rank, message) as they arrive, until all processes are done. However the generator ends (done, an exception,
    the caller closing it), every process has ended before it returns. If the parent is killed, the processes end by
    themselves.

    Raises:
        ProcessFailed: a process raised, with its traceback, or died.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOAD, *preload])
    with tempfile.TemporaryDirectory(prefix="vescale-ranks-") as folder:
        running: dict[Connection, tuple[int, Any]] = {}
        processes = []
        try:
            for rank in range(-1 if one_device else 0, ranks):
                here, there = context.Pipe()
                process = context.Process(
                    target=_child, args=(work, job, rank, ranks, os.path.join(folder, "store"), there), daemon=True
                )
                process.start()
                there.close()
                processes.append(process)
                running[here] = (rank, process)
            while running:
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    rank, process = running[ready]
                    try:
                        message = ready.recv()
                    except (EOFError, ConnectionResetError):
                        process.join(5)
                        raise ProcessFailed(
                            f"{_name(rank)} ended with exit code {process.exitcode}; the other processes were stopped"
                        ) from None
                    if message[0] == "failed":
                        raise ProcessFailed(f"{_name(rank)} failed; the other processes were stopped\n{message[1]}")
                    if message[0] == "done":
                        del running[ready]
                    else:
                        yield rank, message
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _name(rank: int) -> str:
    return "the one-device process" if rank < 0 else f"rank {rank}"


def _child(work: Callable[..., None], job: Any, rank: int, world_size: int, store: str, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is sent to the whole group; the parent handles it
    threading.Thread(target=_end_with_parent, args=(pipe,), daemon=True).start()
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if rank >= 0:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(minutes=5),
            )
        work(job, rank, pipe.send)
        pipe.send(("done",))
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send(("failed", traceback.format_exc()))


def _end_with_parent(pipe: Connection) -> None:
    """The parent never sends: the end of the pipe closes when the parent ends."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)
