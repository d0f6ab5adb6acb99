"""Jobs of a test's own, for ranks that are killed, stopped, or end the job: processes forked from a server with
torch loaded."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from tests.fork_server import fork_context

__all__ = ["JobResult", "run_job", "run_processes"]


@dataclass(frozen=True)
class JobResult:
    """Exit codes by rank (minus the signal's number for killed ones), what each rank printed, and how long it took."""

    codes: list[int | None]
    outputs: list[str]
    seconds: float

    @property
    def text(self) -> str:
        return "\n".join(
            f"--- rank {rank}, exit code {code}\n{out}"
            for rank, (code, out) in enumerate(zip(self.codes, self.outputs))
        )


def run_job(
    fn: Callable[..., None],
    folder: Path,
    *args: Any,
    world_size: int = 3,
    limit: float = 40.0,
    env: dict[str, str] | None = None,
) -> JobResult:
    """Run ``fn(*args)`` on ranks of a new job, whose process group exists."""
    return run_processes(_in_a_group, folder, fn, *args, world_size=world_size, limit=limit, env=env)


def run_processes(
    fn: Callable[..., None],
    folder: Path,
    *args: Any,
    world_size: int = 3,
    limit: float = 40.0,
    env: dict[str, str] | None = None,
) -> JobResult:
    """Run ``fn(*args)`` in processes with the environment of ``torchrun``'s ranks. The store is kept by this process, as
    torchrun's agent does. Ranks that have not ended after ``limit`` seconds are killed, and have None as exit code."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_context()
    loaded = context.Process(target=int)  # the server answers when it has loaded torch, which the limit does not count
    loaded.start()
    loaded.join()
    begin = time.monotonic()
    processes = [
        context.Process(
            target=_rank, args=(fn, rank, world_size, store.port, str(folder), dict(env or {}), args), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(max(0.0, begin + limit - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    seconds = time.monotonic() - begin
    return JobResult(codes, [(folder / f"out{rank}").read_text() for rank in range(world_size)], seconds)


def _rank(
    fn: Callable[..., None], rank: int, size: int, port: int, folder: str, env: dict[str, str], args: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), VESCALE_REPORTS=folder, **env)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # where nobody knows the host's name, gloo would warn
    out = os.open(os.path.join(folder, f"out{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    try:
        fn(*args)
    except SystemExit as error:
        _end(error.code if isinstance(error.code, int) else 1)
    except BaseException as error:  # as the interpreter does with one that leaves the program
        sys.excepthook(*sys.exc_info())
        traceback.print_exc()
        print("raised:", *(kind.__name__ for kind in type(error).__mro__))
        _end(1)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    _end(0)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(code)


def _in_a_group(fn: Callable[..., None], *args: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    fn(*args)
