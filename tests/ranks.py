"""Pools of gloo ranks for the whole test run: one set of processes for each world size, started on first use.

A case is a module-level function; ``ranks.run(fn, *args, world_size=4)`` calls it on every rank with
``torch.distributed`` initialized and returns the results in rank order. Processes are forked from a server that has
torch and the test modules loaded, so a pool starts in well under a second. The process groups of a case's meshes are
reused by the cases after it. A pool is replaced before the next case if a case has failed, or if cases have made many
groups of their own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.device import BACKEND, DEVICE, build, everywhere, register, runs_everywhere
from tests.examples import daily_sample
from tests.fork_server import fork_context

__all__ = [
    "GARBAGE_THRESHOLDS",
    "ON_DEVICE",
    "STARTS",
    "RankError",
    "RankPool",
    "RankPools",
    "error_of",
    "run_cases",
    "run_functions",
]


class RankError(AssertionError):
    """A case failed on at least one rank; the message holds the traceback of each."""


# A collective that some rank never enters fails on the others after this long.
_TIMEOUT = timedelta(seconds=60)

# Of ``gc.set_threshold``, in the test process and in ranks.
GARBAGE_THRESHOLDS = 2000, 20, 20

# So many cases of one test are combinations, of which a part runs daily.
_LONG = 10

# Each group of gloo keeps two threads; groups of meshes are never freed.
_MAX_THREADS = 300


STARTS: Counter[str] = Counter()
"""How many processes were started in this test run, by the reason why the pool was not there."""

ON_DEVICE: Counter[str] = Counter()
"""Of cases on the simulated device: how many there were, and, over all ranks, compared pairs of uses, races and waits of the
host."""


class _ReusedGroups:
    """Makes the process groups of device meshes, and lends those of finished cases to later ones.

    Making a group costs a rendezvous and two threads forever. Within a case no group is lent twice, so a case still
    has as many distinct groups as it asks for. All ranks of a pool make the same requests in the same order, as
    ``torch.distributed.new_group`` demands, and so are lent the same groups. Groups of another
    world, which an estimate makes for a while, end with it.
    """

    def __init__(self, new_group: Callable[..., Any], world: Callable[[], Any]) -> None:
        self._new_group, self._world, self._own = new_group, world, world()
        self._free: dict[tuple[Any, ...], deque[Any]] = defaultdict(deque)
        self._lent: list[tuple[tuple[Any, ...], Any]] = []

    def __call__(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
        use_local_synchronization: bool = False,
        group_desc: str | None = None,
        **others: Any,
    ) -> Any:
        own = dict(
            timeout=timeout, pg_options=pg_options, use_local_synchronization=use_local_synchronization, **others
        )
        if any(own.values()) or self._world() is not self._own:
            return self._new_group(ranks=ranks, backend=backend, group_desc=group_desc, **own)
        key = tuple(ranks), backend, group_desc
        free = self._free[key]
        group = free.popleft() if free else self._new_group(ranks=ranks, backend=backend, group_desc=group_desc)
        self._lent.append((key, group))
        return group

    def take_back(self) -> None:
        """At the end of a case: its groups are free again."""
        for key, group in self._lent:
            self._free[key].append(group)
        self._lent.clear()


def _serve(rank: int, world_size: int, device: str, port: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.device_mesh as device_mesh

    _end_with_run()
    stacks = open(_stack_file(folder, rank), "w")  # noqa: SIM115
    faulthandler.enable(stacks)  # of a rank that dies
    os.dup2(stacks.fileno(), 2)  # what C++ says before it ends the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
    torch.set_num_threads(1)
    gc.freeze()  # what the fork server has loaded is never searched for garbage
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    _share_gloo_device()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    simulated = register() if device == DEVICE else None
    dist.init_process_group(
        f"cpu:gloo,{DEVICE}:{BACKEND}" if simulated else "gloo",
        store=dist.TCPStore("localhost", port, world_size),
        rank=rank,
        world_size=world_size,
        timeout=_TIMEOUT,
    )
    groups = device_mesh.new_group = _ReusedGroups(device_mesh.new_group, lambda: dist.group.WORLD)
    num_modules = len(sys.modules)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        fn, args, kwargs = job
        torch.manual_seed(0)  # ranks start alike, whatever the case before has drawn
        if simulated:
            simulated.clear()
        try:
            is_everywhere = simulated is not None and runs_everywhere()
            answer = (True, everywhere(fn, *args, **kwargs) if is_everywhere else fn(*args, **kwargs))
            if simulated and (races := simulated.races()):
                answer = (False, f"{len(races)} races on the simulated device, the first of which is\n{races[0]}")
        except BaseException:
            answer = (False, traceback.format_exc())
        groups.take_back()
        if len(sys.modules) > num_modules:  # nor is what cases have loaded
            num_modules = len(sys.modules)
            gc.collect()
            gc.freeze()
        found: dict[str, int] = {}
        if simulated:
            found = {
                "pairs": simulated.checked_pairs(),
                "races": len(simulated.races()),
                "host waits": simulated.num_syncs(),
            }
        try:
            pipe.send((*answer, found))
        except Exception:  # the result cannot be pickled
            pipe.send((False, traceback.format_exc(), found))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _share_gloo_device() -> None:
    """All groups of this process use one gloo device, whose thread wakes up a hundred times a second; by default each has
    a device of its own."""
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    make, device = ProcessGroupGloo.__init__, ProcessGroupGloo.create_default_device()

    def make_on_device(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        options: Any = None,
        *,
        timeout: timedelta | None = None,
        **others: Any,  # of newer versions
    ) -> None:
        if options is None:
            options = ProcessGroupGloo._Options()
            options._devices, options._threads = [device], 2
            if timeout is not None:
                options._timeout = timeout
            for name, value in others.items():
                setattr(options, name, value)
        make(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = make_on_device


def _end_with_run() -> None:
    """A killed test run leaves no ranks behind. Their parent, the fork server, lives as long as any rank does."""
    run = multiprocessing.parent_process()
    assert run is not None

    def wait_for_end() -> None:
        run.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True, name="end with the test run").start()


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack of rank {rank}"


class RankPool:
    """``world_size`` gloo processes that stay alive between cases; with the simulated accelerator if ``device`` is "sim"."""

    def __init__(self, world_size: int, device: str = "cpu") -> None:
        import torch.distributed as dist

        if device == DEVICE:
            build()  # once, and not by each rank
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="vescale-ranks-")
        # Ranks that wait at a store in a file look at it every 10 ms.
        self._store = dist.TCPStore("localhost", 0, world_size, is_master=True, wait_for_workers=False)
        context = fork_context()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            given = rank, world_size, device, self._store.port, self._folder.name, there
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Call ``fn`` on every rank; raise :class:`RankError` if any rank fails, dies or does not answer in time."""
        for pipe in self._pipes:
            pipe.send((fn, args, kwargs))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    *answer, found = pipe.recv()
                    answers[rank] = answer[0], answer[1]
                    ON_DEVICE.update(found)
                except (EOFError, ConnectionError):  # the latter if it died with a case still to be read
                    answers[rank] = (False, self._obituary(rank))
                if not answers[rank][0]:  # peers may be stuck in a collective that this rank never entered
                    deadline = min(deadline, time.monotonic() + 10.0)
        failed = {rank: text for rank, (ok, text) in sorted(answers.items()) if not ok}
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if failed or silent:
            stacks = self._stacks(silent)
            self.close()  # collectives that some ranks never entered must not meet those of the next case
            parts = [f"--- rank {rank} of {self.world_size}:\n{text}" for rank, text in failed.items()]
            parts += [f"--- no answer from rank {rank}, which is here:\n{text}" for rank, text in stacks.items()]
            raise RankError("\n".join(["", *parts]))
        return [answers[rank][1] for rank in range(self.world_size)]

    def _obituary(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(timeout=10)
        return f"the process died with exit code {process.exitcode}\n{_stack_file(self._folder.name, rank).read_text()}"

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where the main threads of ``ranks`` are."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(1.0)
        return {rank: _stack_file(self._folder.name, rank).read_text() for rank in ranks}

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    @property
    def is_worn(self) -> bool:
        """Whether cases have left so many process groups behind that their threads slow everything down."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.exists() and sum(1 for _ in tasks.iterdir()) > _MAX_THREADS

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes.clear()
        self._folder.cleanup()


class RankPools:
    """The pools of one test run, by world size and device."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._pools: dict[tuple[int, str], RankPool] = {}

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = 4,
        timeout: float = 300.0,
        device: str | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        key = world_size, device or self._device
        pool = self._pools.get(key)
        reason = "first use" if pool is None else "" if pool.alive else "after a failure"
        if pool is not None and not reason and pool.is_worn:
            pool.close()
            reason = "too many groups"
        if pool is None or reason:
            pool = self._pools[key] = RankPool(*key)
            STARTS[reason] += world_size
        if key[1] == DEVICE:
            ON_DEVICE["cases"] += 1
        return pool.run(fn, *args, timeout=timeout, **kwargs)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def error_of(fn: Callable[..., Any], *args: Any) -> str:
    """Run on a rank: the traceback of ``fn(*args)``, which raises on every rank; the pool is not replaced."""
    try:
        fn(*args)
    except BaseException:  # as CheckpointException is
        return traceback.format_exc()
    raise AssertionError(f"{fn.__qualname__} has raised nothing")


def run_cases(fn: Callable[..., None], cases: Sequence[tuple[Any, ...]]) -> int:
    """Run on a rank: ``fn(*case)`` for each case, all in one dispatch; name every case that fails. Returns the count.

    Of a long list of combinations one in three runs daily (``daily_sample``), and all at night; the count is of all.
    For cases whose failure does not desynchronize the ranks (a comparison after the collectives). Stops at the tenth, and
    where a collective seems to have waited for a rank in vain: the ranks are no longer in the same case then.
    """
    is_long = len(cases) >= _LONG and all(len(case) > 1 for case in cases)
    failures = []
    for case in daily_sample(cases, 3) if is_long else cases:
        start = time.monotonic()
        try:
            fn(*case)
        except Exception:
            failures.append(f"case {case!r}:\n{traceback.format_exc()}")
            if len(failures) == 10 or time.monotonic() - start > _TIMEOUT.total_seconds() / 2:
                break
    if failures:
        raise AssertionError(f"{len(failures)} of {len(cases)} cases failed\n" + "\n".join(failures))
    return len(cases)


def run_functions(functions: Sequence[Callable[[], None]]) -> int:
    """Run on a rank: :func:`run_cases`, where each case is a function of its own."""
    return run_cases(lambda function: function(), [(function,) for function in functions])
