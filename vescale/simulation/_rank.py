"""``run_rank``: the process of one simulated rank, from its fork to its end."""

from __future__ import annotations

import base64
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
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale.agreement import listen_to_descriptions
from vescale.buffer import observe_allocations
from vescale.checkpoint import leave_files_alone
from vescale.comm import observe
from vescale.compat import bytes_of, in_backward, tree_leaves
from vescale.compat.simulated_ranks import OnHost, become_rank, work_of
from vescale.debug import place_of_traceback
from vescale.estimation import (
    Instant,
    MemoryLog,
    Rehearsal,
    Routing,
    UnfilledTensors,
    balanced_tokens,
    classify,
    timeline_of,
)
from vescale.pipeline import Runner
from vescale.runtime import current_activation, locate
from vescale.simulation._link import KeyNeverComes, Link, SharedStore, seconds_without_processor
from vescale.simulation._tracer import Call, Ending, RankRecord, Tracer

# ``SimulatedTensors``: ops compute no large numbers, and collectives on small tensors bring the values of the other
# simulated ranks, on which programs branch: sizes, flags, pickled objects.


_MOST_BYTES, _MOST_FLOATS = 1 << 20, 1024  # of integers; of floating-point numbers
_FUNCTIONAL = ("_c10d_functional", "c10d_functional")
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


class SimulatedTensors(UnfilledTensors):
    """See the module.

    Attributes:
        seconds: processor time of simulated ops and collectives.
    """

    def __init__(self, log: MemoryLog, rank: int, link: Link, tracer: Tracer) -> None:
        super().__init__(log, Routing())
        self.seconds = 0.0
        self._rank, self._link, self._tracer = rank, link, tracer
        self._messages: Counter[str] = Counter()
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = time.thread_time() if not self._depth else 0.0
        self._depth += 1
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.thread_time() - begin

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func.namespace in _FUNCTIONAL:
            return self._functional(func, args, kwargs, tensors)
        if func.namespace != "c10d" or not any(a.name == "process_group" for a in func._schema.arguments):
            return super()._run(func, args, kwargs, tensors)
        call = Call.of(func, args, kwargs)
        given = self._given(call)
        self._tracer.begin(call)
        try:
            result = super()._run(func, args, kwargs, tensors)
        finally:
            number = self._tracer.end(work_of(result) if "result" in locals() else None)
        if number is not None and given is not None:
            self._exchange(call, given, self._tracer.operations[-1].number)
        return result

    def _functional(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        if func.overloadpacket.__name__ == "wait_tensor":
            self._tracer.waited_for_result(args[0])
            return super()._run(func, args, kwargs, tensors)
        before = len(self._tracer.calls)
        self._tracer.begin_functional()
        result = None
        try:
            result = super()._run(func, args, kwargs, tensors)
        finally:
            self._tracer.end_functional(before, result)
        return result

    # Values

    def _given(self, call: Call) -> list[torch.Tensor] | None:
        """The tensors that a call reads, or, of a receive, writes; None: they are not exchanged."""
        found = next(
            (call.arguments[n] for n in ("input_tensors", "input_tensor", "input", "tensors") if n in call.arguments),
            (),
        )
        tensors = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        if call.name == "scatter_":
            tensors = tensors or [
                x for x in tree_leaves(call.arguments["output_tensors"]) if isinstance(x, torch.Tensor)
            ]
        if call.name not in _EXCHANGED or not tensors or len(call.ranks) == 1:
            return None
        for x in tensors:
            limit = _MOST_FLOATS * x.element_size() if x.dtype.is_floating_point else _MOST_BYTES
            if x.dtype.is_complex or x.numel() * x.element_size() > limit:
                return None
        return tensors

    def _exchange(self, call: Call, given: list[torch.Tensor], number: int) -> None:
        is_control = not given[0].dtype.is_floating_point
        if call.name in ("send", "recv_"):
            ends = f"{self._rank}>{call.peer}" if call.name == "send" else f"{call.peer}>{self._rank}"
            place = f"{call.group} message {ends}"
            self._messages[place] += 1
            place = f"{place} {self._messages[place]}"
        else:
            size = sum(x.numel() * x.element_size() for x in given) if call.name != "scatter_" else 0
            place = f"{call.group} {call.ranks[0]} {call.ranks[-1]} {len(call.ranks)} {number} {call.name} {size}"
        source = call.root if call.name in ("broadcast_", "scatter_") else call.peer if call.name == "recv_" else None
        if source is None or source == self._rank:
            known = all(map(self.is_known, given))
            self._link.tell("give", place=place, value=[_pack(x) for x in given] if known else None)
        if call.name == "send" or (source == self._rank and call.name == "broadcast_"):
            return
        if call.name in ("reduce_", "gather_") and call.root != self._rank:
            return
        if call.name == "scatter_" and call.root == self._rank:
            found = {self._rank: [_pack(x) for x in given] if all(map(self.is_known, given)) else None}
        else:
            needs = [source] if source is not None and is_control else []
            wanted = list(call.ranks) if source is None else [source]
            answer = self._link.ask("take", place=place, needs=needs, **{"from": wanted})
            found = {int(rank): value for rank, value in answer.items()}
        if source is None:
            own = [x.clone() for x in given]
            self._combine(call, own, found)
        elif source in found:
            self._receive(call, found[source])

    def _receive(self, call: Call, value: list[str] | None) -> None:
        """Of a broadcast, a scatter or a message."""
        if call.name == "scatter_":
            targets = [x for x in tree_leaves(call.arguments["output_tensors"]) if isinstance(x, torch.Tensor)]
            value = value if value is None else [value[call.ranks.index(self._rank)]]
        else:
            targets = [x for x in tree_leaves(call.arguments["tensors"]) if isinstance(x, torch.Tensor)]
        for number, target in enumerate(targets):
            self._write(target, None if value is None else _unpack(value[number], target))

    def _combine(self, call: Call, own: list[torch.Tensor], found: dict[int, Any]) -> None:
        """Ranks that were not simulated have the values of this one."""
        known = all(map(self.is_known, own)) and all(value is not None for value in found.values())
        for number, mine in enumerate(own):
            parts = [
                _unpack(found[rank][number], mine) if found.get(rank) else mine if known else None
                for rank in call.ranks
            ]
            if call.name in ("allreduce_", "reduce_"):
                self._write(call.arguments["tensors"][number], _reduced(parts, call) if known else None)
            elif call.name == "_allgather_base_":
                output = call.arguments["output_tensor"]
                self._write(output, torch.cat([p.reshape(-1) for p in parts if p is not None]) if known else None)
            else:  # lists of tensors
                for target, part in zip(call.arguments["output_tensors"][number], parts):
                    self._write(target, part if known else None)

    def _write(self, target: torch.Tensor, value: torch.Tensor | None) -> None:
        if value is None or value.numel() != target.numel():
            if target.dtype.is_floating_point:
                self.forget(target)
            return
        target.copy_(value.reshape(target.shape))
        self.learn(target)


_EXCHANGED = (
    "allreduce_",
    "reduce_",
    "broadcast_",
    "_allgather_base_",
    "allgather_",
    "gather_",
    "scatter_",
    "send",
    "recv_",
)


def _reduced(parts: list[Any], call: Call) -> torch.Tensor:
    kind = call.agreed.get("reduction", "sum")
    function = _REDUCTIONS.get(kind, torch.add)
    total: torch.Tensor = parts[0].clone()
    for part in parts[1:]:
        total = function(total, part)
    return total / len(parts) if kind == "avg" else total


def _pack(x: torch.Tensor) -> str:
    return base64.b64encode(bytes_of(x).numpy().tobytes()).decode()


def _unpack(text: str, like: torch.Tensor) -> torch.Tensor:
    data = bytearray(base64.b64decode(text))
    if not data:
        return torch.empty(0, dtype=like.dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(like.dtype)


# Memory of a training script by the categories of :mod:`vescale.estimation`: which modules and optimizers there are, and
# where the run is, is learned from PyTorch's global hooks.


_ROUNDING = 512  # of blocks of PyTorch's allocator for CUDA
_FIRST_STEPS = 3  # in which optimizers make their states


class ScriptMemory:
    """Hooks of this process, which stay.

    Attributes:
        log: all memory.
        seconds: processor time that the hooks have taken.
    """

    def __init__(self) -> None:
        self.log = MemoryLog(self._place)
        self.seconds = 0.0
        self._found = Rehearsal(self.log, 1)
        self._micro_step = 0
        self._phase = "start"
        self._first: int | None = None  # the instant of the first forward
        self._depth = 0
        self._has_gone_back = False
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        register_module_forward_pre_hook(self._enters)
        register_module_forward_hook(self._leaves, always_call=True)
        register_optimizer_step_pre_hook(self._optimizer_begins)
        register_optimizer_step_post_hook(self._optimizer_ends)

    def peak(self) -> tuple[int, str, dict[str, int]]:
        """Bytes at the peak, the instant, and its categories.

        From the first forward on: before it, a model may be whole on the host, from where its parts go to devices.
        """
        for model in list(self._models):
            classify(model, None, self._found)
        self.log.is_closed = True
        self._found.num_steps = self._micro_step + 1
        timeline = timeline_of(self._found, (), _ROUNDING)
        first = self._first if self._first is not None and self._first < len(timeline.total) else 0
        if not len(timeline.total):
            return 0, "", {}
        best = first + int(np.argmax(timeline.total[first:]))
        instant = timeline.instants[best]
        at = f"{instant.phase} {instant.module or ''}".rstrip()
        return int(timeline.total[best]), at, {name: size for name, size in timeline.at(best).items() if size}

    def _place(self) -> Instant:
        if in_backward():
            self._has_gone_back = True
            activation = current_activation()
            if activation is not None:
                return Instant(self._micro_step, "recompute", activation.frames[-1].path)
            found = locate()
            return Instant(self._micro_step, "backward", found.path if found is not None else None)
        activation = current_activation()
        if activation is not None:
            return Instant(self._micro_step, "forward", activation.frames[-1].path)
        return Instant(self._micro_step, "forward" if self._depth else self._phase, None)

    def _enters(self, module: nn.Module, _: Any) -> None:
        self._depth += 1
        parameter = next(module.parameters(), None)
        if self._depth > 1 or in_backward() or (parameter is not None and parameter.is_meta):
            return  # a trace on meta tensors, as parallelize makes of stages, is no forward of the program
        if self._first is None:
            self._first = len(self.log.instants)
        if self._has_gone_back:
            self._micro_step += 1
            self._has_gone_back = False
        if module not in self._models:
            self._note(module, None)
            self._models.add(module)

    def _leaves(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and not in_backward():
            self._phase = "loss" if torch.is_grad_enabled() else "start"

    def _optimizer_begins(self, optimizer: Any, *_: Any) -> None:
        self._phase = "optimizer"
        for model in list(self._models):
            self._note(model, optimizer)

    def _optimizer_ends(self, optimizer: Any, *_: Any) -> None:
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if number <= _FIRST_STEPS:
            for model in list(self._models):
                self._note(model, optimizer)
        self._phase = "start"
        self._has_gone_back = True

    def _note(self, model: nn.Module, optimizer: Any) -> None:
        begin = time.thread_time()
        classify(model, optimizer, self._found)
        self.seconds += time.thread_time() - begin


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
