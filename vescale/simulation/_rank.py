"""``run_rank``: the process of one simulated rank, from its fork to its end."""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
import warnings
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vescale.agreement import listen_to_descriptions
from vescale.buffer import observe_allocations
from vescale.checkpoint import leave_files_alone
from vescale.comm import observe
from vescale.compat.simulated_ranks import OnHost, become_rank
from vescale.debug import place_of_traceback
from vescale.estimation import balanced_tokens
from vescale.pipeline import Runner
from vescale.simulation._link import KeyNeverComes, Link, SharedStore, seconds_without_processor
from vescale.simulation._records import Ending, RankRecord
from vescale.simulation._script_memory import ScriptMemory
from vescale.simulation._shared_values import SimulatedTensors
from vescale.simulation._tracer import Tracer


class _OutOfTime(BaseException):
    pass


def run_rank(rank: int, config: dict[str, Any], connection: Connection) -> NoReturn:
    """Run the script, write the rank's record, and end the process."""
    record = RankRecord(rank)
    folder = Path(config["folder"])
    try:
        _redirect(folder / f"rank_{rank}.log")
        _set_environment(rank, config)
        _run(record, config, Link(connection))
    except BaseException:
        traceback.print_exc()
        record.ending = Ending("error", f"the simulation itself failed: {traceback.format_exc()}")
    part = folder / f"rank_{rank}.part"
    part.write_text(json.dumps(record.to_json()))
    part.rename(folder / f"rank_{rank}.json")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _redirect(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _set_environment(rank: int, config: dict[str, Any]) -> None:
    local = config["ranks_per_node"]
    world = config["world_size"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(min(local, world - rank // local * local)),
        GROUP_RANK=str(rank // local),
        GROUP_WORLD_SIZE=str(-(-world // local)),
        ROLE_RANK=str(rank),
        ROLE_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        TORCHELASTIC_RUN_ID="simulation",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
    )
    sys.argv = [config["script"], *config["args"]]
    sys.path[0] = str(Path(config["script"]).resolve().parent)
    torch.set_num_threads(1)
    random.seed()
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")


def _run(record: RankRecord, config: dict[str, Any], link: Link) -> None:
    tracer, memory = Tracer(), ScriptMemory()
    mode = SimulatedTensors(memory.log, record.rank, link, tracer)
    become_rank(record.rank, config["world_size"], SharedStore(link), tracer.waited, tracer.made_group)
    observe(tracer)
    listen_to_descriptions(tracer.compared)
    _ask_stages(link)
    leave_files_alone()

    waited = seconds_without_processor()

    def out_of_time(_: int, frame: types.FrameType | None) -> None:
        nonlocal waited
        more, waited = seconds_without_processor() - waited, seconds_without_processor()
        if more < 1:
            raise _OutOfTime
        signal.setitimer(signal.ITIMER_REAL, more)

    signal.signal(signal.SIGALRM, out_of_time)
    signal.setitimer(signal.ITIMER_REAL, config["timeout"])
    begin = time.thread_time()
    try:
        with ExitStack() as stack:
            stack.enter_context(observe_allocations(memory.log.resized))
            stack.enter_context(balanced_tokens(mode.routing))
            stack.enter_context(mode)
            stack.enter_context(OnHost())
            runpy.run_path(config["script"], run_name="__main__")
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        record.ending = _ending(error, config["timeout"])
    signal.setitimer(signal.ITIMER_REAL, 0)
    record.host_seconds = max(0.0, time.thread_time() - begin - mode.seconds - memory.seconds)
    record.calls, record.order = tracer.calls, tracer.order
    record.peak_bytes, record.peak_at, record.categories = memory.peak()


def _ask_stages(link: Link) -> None:
    """A pipeline's stage learns what it receives from the rank of the stage before, which must be simulated as well. What
    it receives has no values, so that no rows are tried."""
    original = Runner.header

    def header(runner: Runner, stage: int) -> Any:
        link.tell("need", rank=dist.get_global_rank(runner.group, runner.schedule.rank_of[stage - 1]))
        return original(runner, stage)

    Runner.header = header  # type: ignore[method-assign, assignment]
    Runner.tries_rows = False


def _ending(error: BaseException, seconds: float) -> Ending:
    at = place_of_traceback(error.__traceback__).text()
    if isinstance(error, _OutOfTime):
        return Ending(
            "timeout",
            f"has not ended after {seconds:g} seconds; if it is not in an endless loop, pass a larger --timeout",
            at,
        )
    if isinstance(error, SystemExit):
        if error.code in (None, 0):
            return Ending()
        return Ending("error", f"exits with {error.code!r}", at)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyNeverComes):
            return Ending("never-comes", str(cause), at)
        cause = cause.__cause__ or cause.__context__
    traceback.print_exception(error)
    return Ending("error", f"{type(error).__name__}: {error}", at)
