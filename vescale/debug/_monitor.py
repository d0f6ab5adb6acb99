"""``monitor``: loss, speed, memory and communication of each training step, on the console and in files."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.comm import HostCopy, Observer, Operation, bytes_text, observe
from vescale.compat.consoles import Console
from vescale.debug._model_flops import flops_per_token as count_flops
from vescale.debug._model_flops import measured_flops, peak_flops
from vescale.errors import DebugOptionError, MissingPackageError

# Counts, bytes and seconds of collectives by mesh axis, without keeping the collectives.


@dataclass
class AxisTraffic:
    """Collectives of one axis.

    Attributes:
        count: operations; bytes: what this rank received from others. Where parts are uneven, what the calls move: an equal
            share of them, with padding.
        seconds: the time in which at least one of them was under way; None if a device does not tell when they end.
    """

    count: int = 0
    bytes: int = 0
    seconds: float | None = 0.0


@dataclass
class _Span:
    """The union of the times in which something is under way."""

    running: int = 0
    since: float = 0.0
    cpu_since: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def begin(self, now: float, cpu: float) -> None:
        if self.running == 0:
            self.since, self.cpu_since = now, cpu
        self.running += 1

    def end(self, now: float, cpu: float) -> None:
        self.running -= 1
        if self.running == 0:
            self.seconds += now - self.since
            self.cpu_seconds += cpu - self.cpu_since


class CommMeter(Observer):
    """Collectives that start between :meth:`start` and :meth:`stop`. Groups of one rank are left out.

    Args:
        is_timed: whether the ends of collectives are notified, as those of tensors in the host's memory are.

    Attributes:
        axes: by the names of the axes that a group spans, joined with ``,``; ``all ranks`` or ``ranks [0, 2]`` for groups
            without names.
        is_paused: whether collectives that start now are left out.
    """

    needs_requesters = False

    def __init__(self, is_timed: bool = True) -> None:
        self.axes: dict[str, AxisTraffic] = {}
        self.is_paused = False
        self._is_timed = is_timed
        self._lock = threading.Lock()
        self._all, self._spans = _Span(), dict[str, _Span]()
        self._under_way: dict[int, tuple[Operation, str]] = {}
        self._end: Callable[[], None] | None = None
        self._clock: int | None = None

    def start(self) -> None:
        """Observe from now on. The calling thread is the one whose waiting :meth:`exposed_seconds` counts."""
        self.stop()
        self.axes, self._all, self._spans, self._under_way = {}, _Span(), {}, {}
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self._end = observe(self)

    def stop(self) -> None:
        """No longer observe. What is under way counts until now."""
        if self._end is None:
            return
        self._end()
        self._end = None
        for operation, _ in list(self._under_way.values()):
            self.ended(operation)

    def exposed_seconds(self) -> float | None:
        """The time in which collectives were under way and the thread that called :meth:`start` did not compute: it waited
        for them (or for a processor). None where that is not known: on devices, and without clocks of threads."""
        if not self._is_timed or self._clock is None:
            return None
        return max(0.0, self._all.seconds - self._all.cpu_seconds)

    def started(self, operation: Operation) -> None:
        if len(operation.ranks) == 1 or self.is_paused:
            return
        name = operation.axes or _ranks_text(operation.ranks)
        with self._lock:
            traffic = self.axes.setdefault(name, AxisTraffic(seconds=0.0 if self._is_timed else None))
            traffic.count += 1
            traffic.bytes += operation.bytes
            if not self._is_timed:
                return
            now, cpu = time.perf_counter(), self._cpu()
            self._all.begin(now, cpu)
            self._spans.setdefault(name, _Span()).begin(now, cpu)
            self._under_way[id(operation)] = operation, name

    def ended(self, operation: Operation) -> None:
        with self._lock:
            found = self._under_way.pop(id(operation), None)
            if found is None:
                return
            now, cpu = time.perf_counter(), self._cpu()
            span = self._spans[found[1]]
            self._all.end(now, cpu)
            span.end(now, cpu)
            self.axes[found[1]].seconds = span.seconds

    def _cpu(self) -> float:
        return time.clock_gettime(self._clock) if self._clock is not None else 0.0


def _ranks_text(ranks: tuple[int, ...]) -> str:
    return "all ranks" if len(ranks) == dist.get_world_size() else f"ranks {list(ranks)}"


# Where a monitor's records go: a line on the console, JSON lines, TensorBoard.


@dataclass
class StepRecord:
    """One training step, as this rank saw it.

    Attributes:
        step: its number.
        loss: as passed to :meth:`Monitor.step`, or None.
        seconds: from the end of the step before.
        tokens: of the whole job in this step.
        tokens_per_second: of the whole job.
        mfu: model FLOPs utilization: the operations that the model's parameters ask for, as a part of what the devices of
            the job can do; None if one of them is not known.
        memory_bytes: of a GPU, the peak that was allocated during the step; of a CPU, the process's resident memory,
            read at most ten times a second.
        comm: collectives by axis; None for a step in which they were not observed.
        exposed_seconds: the part of ``seconds`` in which collectives were under way and this rank did not compute; None
            where that is not known.
        more: numbers that were passed to :meth:`Monitor.step` by name.
    """

    step: int
    loss: float | None
    seconds: float
    tokens: int | None
    tokens_per_second: float | None
    mfu: float | None
    memory_bytes: int
    comm: dict[str, AxisTraffic] | None = None
    exposed_seconds: float | None = None
    more: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The record as a line of the JSONL file has it."""
        own = {name: value for name, value in vars(self).items() if name not in ("more", "comm")}
        comm = None if self.comm is None else {axis: asdict(traffic) for axis, traffic in self.comm.items()}
        return {**self.more, **own, "comm": comm}


class Output(Protocol):
    """Takes records in the order of steps."""

    def write(self, record: StepRecord) -> None: ...
    def close(self) -> None: ...


class ConsoleLines:
    """One line for each observed step, and for the first one that ends ``seconds`` or more after the last line."""

    def __init__(self, console: Console | None = None, seconds: float = 10) -> None:
        self._console = console or Console(markup=False, highlight=False, soft_wrap=True)
        self._seconds, self._printed = seconds, time.perf_counter()

    def write(self, record: StepRecord) -> None:
        now = time.perf_counter()
        if record.comm is not None or now - self._printed >= self._seconds:
            self._printed = now
            self._console.print(line_of(record))

    def close(self) -> None: ...


class JsonLines:
    """One JSON object a line, for each step; a file that exists is continued."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a")  # noqa: SIM115

    def write(self, record: StepRecord) -> None:
        self._file.write(json.dumps(record.to_json()) + "\n")
        if record.comm is not None:
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars: loss, speed, memory and given numbers of each step; communication of observed ones."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, record: StepRecord) -> None:
        scalars: dict[str, float | int | None] = {
            "train/loss": record.loss,
            "speed/tokens_per_second": record.tokens_per_second,
            "speed/mfu": record.mfu,
            "speed/seconds": record.seconds,
            "memory/bytes": record.memory_bytes,
            "comm/exposed_seconds": record.exposed_seconds,
            **{f"train/{name}": value for name, value in record.more.items()},
        }
        for axis, traffic in (record.comm or {}).items():
            scalars |= {f"comm/{axis}/bytes": traffic.bytes, f"comm/{axis}/seconds": traffic.seconds}
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self._writer.close()


def require_tensorboard() -> None:
    """Raises ImportError with what to install."""
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingPackageError("monitor(tensorboard=...) needs the package tensorboard; pip install tensorboard")


def line_of(record: StepRecord) -> str:
    """``step 20  loss 2.3412  12,345 tokens/s  MFU 41.2 %  2.1 GiB  tp 24x 1.5 MiB 3.1 ms  exposed 2.2 ms (4 %)``"""
    parts = [f"step {record.step}"]
    if record.loss is not None:
        parts.append(f"loss {record.loss:.4f}")
    parts += [f"{name} {value:.4g}" for name, value in record.more.items()]
    if record.tokens_per_second is not None:
        parts.append(f"{record.tokens_per_second:,.0f} tokens/s")
    else:
        parts.append(f"{1e3 * record.seconds:.0f} ms")
    if record.mfu is not None:
        parts.append(f"MFU {100 * record.mfu:.1f} %")
    parts.append(bytes_text(record.memory_bytes))
    for axis, traffic in (record.comm or {}).items():
        timed = f" {1e3 * traffic.seconds:.1f} ms" if traffic.seconds is not None else ""
        parts.append(f"{axis} {traffic.count}x {bytes_text(traffic.bytes)}{timed}")
    if record.exposed_seconds is not None and record.comm:
        share = record.exposed_seconds / record.seconds if record.seconds else 0.0
        parts.append(f"exposed {1e3 * record.exposed_seconds:.1f} ms ({100 * share:.0f} %)")
    return "  ".join(parts)


class Monitor:
    """See :func:`monitor`. A context manager; without ``with``, call :meth:`close` at the end.

    Attributes:
        last: the record of the newest step whose loss has been read, or None.
        flops_per_token, peak_flops: what MFU is computed from; None: not known.
    """

    def __init__(
        self,
        outputs: Sequence[Output],
        device: torch.device,
        *,
        every: int,
        flops_per_token: float | None,
        peak_flops: float | None,
    ) -> None:
        self.last: StepRecord | None = None
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self._outputs = list(outputs)
        self._device, self._every = device, every
        self._num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._meter = CommMeter(is_timed=device.type == "cpu")
        self._waiting: deque[tuple[StepRecord, HostCopy]] = deque()
        self._count, self._is_open = 0, True
        self._resident, self._read_memory_at = 0, 0.0
        self._observe_next()
        self._began = time.perf_counter()

    def step(
        self,
        loss: torch.Tensor | float | None = None,
        *,
        tokens: int | None = None,
        step: int | None = None,
        **more: float,
    ) -> StepRecord:
        """Mark the end of a training step; call it on every rank, after ``optimizer.step()``.

        A loss on a device is copied, and read at the end of a later step, so that the host does not wait for it. One that is
        a DTensor is gathered at once, on all ranks.

        Args:
            loss: of the step, a 0-dim tensor or a number.
            tokens: (or images, or samples) that the whole job has trained on in this step.
            step: its number; None: they are counted from 0.
            **more: numbers to record, such as ``lr=``.

        Returns:
            The record. Its loss is None while it has not been read.
        """
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        is_observed = self._count % self._every == 0
        if is_observed:
            self._meter.stop()
        speed = tokens / seconds if tokens is not None and seconds > 0 else None
        record = StepRecord(
            step=self._count if step is None else step,
            loss=None,
            seconds=seconds,
            tokens=tokens,
            tokens_per_second=speed,
            mfu=self._mfu(speed),
            memory_bytes=self._memory(),
            comm=self._meter.axes if is_observed else None,
            exposed_seconds=self._meter.exposed_seconds() if is_observed else None,
            more={name: float(value) for name, value in more.items()},
        )
        if isinstance(loss, torch.Tensor):
            if loss.numel() != 1:
                raise DebugOptionError(
                    f"loss has shape {tuple(loss.shape)}; pass a number, or a tensor with one element"
                )
            own = loss.detach()
            self._waiting.append((record, HostCopy(own.full_tensor() if isinstance(own, DTensor) else own)))
            self._flush(_MOST_WAITING if loss.device.type != "cpu" else 0)
        else:
            record.loss = float(loss) if loss is not None else None
            self._flush()
            self._emit(record)
        self._count += 1
        self._observe_next()
        return record

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Around what is no part of a training step, such as an evaluation between two of them: neither its time nor its
        collectives count.

        ```python
        with watch.pause():
            evaluate(model)
        ```
        """
        began, was_paused = time.perf_counter(), self._meter.is_paused
        self._meter.is_paused = True
        try:
            yield
        finally:
            self._meter.is_paused = was_paused
            if not was_paused:
                self._began += time.perf_counter() - began

    def close(self) -> None:
        """Write what waits, and end files."""
        if not self._is_open:
            return
        self._is_open = False
        self._meter.stop()
        self._flush()
        for output in self._outputs:
            output.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:  # the device may wait for ranks that do not come
            self._waiting.clear()
        self.close()

    def _observe_next(self) -> None:
        if self._count % self._every == 0:
            self._meter.start()

    def _flush(self, most: int = 0) -> None:
        """Emit records, in order, whose loss is there, and others until ``most`` are left."""
        while self._waiting and (self._waiting[0][1].is_there() or len(self._waiting) > most):
            record, loss = self._waiting.popleft()
            record.loss = float(loss.read().item())
            self._emit(record)

    def _emit(self, record: StepRecord) -> None:
        self.last = record
        for output in self._outputs:
            output.write(record)

    def _mfu(self, speed: float | None) -> float | None:
        if speed is None or self.flops_per_token is None or self.peak_flops is None:
            return None
        return speed * self.flops_per_token / (self.peak_flops * self._num_ranks)

    def _memory(self) -> int:
        if self._device.type == "cpu":
            if self._began >= self._read_memory_at:
                self._resident, self._read_memory_at = _resident_bytes(), self._began + _MEMORY_SECONDS
            return self._resident
        peak = torch.accelerator.max_memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        return int(peak)


def monitor(
    model: nn.Module,
    *,
    console: bool = True,
    jsonl: str | os.PathLike[str] | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    every: int = 200,
    ranks: Literal["first", "all"] = "first",
    sequence_length: int | None = None,
    flops_per_token: float | None = None,
    peak_flops: float | Literal["measure"] | None = None,
    outputs: Sequence[Output] = (),
) -> Monitor:
    """Record loss, tokens a second, MFU, memory and communication of each step.

    ```python
    with vescale.debug.monitor(model, jsonl="run/steps.jsonl", tensorboard="run") as watch:
        for ids in loader:
            ...
            optimizer.step()
            watch.step(loss, tokens=64 * 1024)
    ```

    Call it on every rank, with models of ``parallelize`` and ``fully_shard``, and with any other one. Nothing of the model
    is changed. Collectives are observed in every ``every``-th step only, from the first on, all that the process starts
    (see :func:`comm_trace`): the other steps pay nothing for it.

    Args:
        model: gives the device and the number of operations for a token; see :func:`flops_per_token`.
        console: a line on the first rank, for each observed step, and for the first step that ends ten seconds or more
            after the last line.
        jsonl: a file to which a JSON object is appended for each step (:meth:`StepRecord.to_json`).
        tensorboard: a folder for TensorBoard.
        every: how often collectives are observed. An observed step takes about 1.1 to 1.3 times as long as another
            one, because its collectives are called through Python.
        ranks: the ranks that write: the first, or ``"all"``: files and folders get the rank's number
            (``steps.3.jsonl``).
        sequence_length: tokens of a sequence, for the operations of attention in MFU.
        flops_per_token: operations of training for a token, instead of :func:`flops_per_token`; a warning tells when it is
            needed.
        peak_flops: operations a second of one device; None: that of a GPU's data sheet (dense bfloat16), on other devices
            there is no MFU; ``"measure"``: what a float32 matrix product reaches here.
        outputs: more of them: objects with ``write(record)`` and ``close()``.

    Raises:
        ImportError: ``tensorboard`` without the package. ValueError: ``every`` below 1, unknown ``ranks``.

    Communication: none, except that a loss that is a pending sum is reduced.
    """
    if every < 1:
        raise DebugOptionError(f"every={every}; pass the interval of observed steps, at least 1")
    if ranks not in ("first", "all"):
        raise DebugOptionError(f"ranks={ranks!r}; pass 'first' or 'all'")
    if tensorboard is not None:
        require_tensorboard()
    parameter = next(model.parameters(), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    peak = _peak(device, peak_flops)
    if flops_per_token is None and peak is not None:
        try:
            flops_per_token = count_flops(model, sequence_length)
        except ValueError as error:
            warnings.warn(f"monitor omits MFU: {error}", stacklevel=2)
    rank = dist.get_rank() if dist.is_initialized() else 0
    chosen: list[Output] = list(outputs)
    if rank == 0 and console:
        chosen.append(ConsoleLines())
    if rank == 0 or ranks == "all":
        if jsonl is not None:
            path = Path(jsonl)
            chosen.append(JsonLines(path if ranks == "first" else path.with_suffix(f".{rank}{path.suffix}")))
        if tensorboard is not None:
            chosen.append(TensorBoard(tensorboard if ranks == "first" else Path(tensorboard) / f"rank {rank}"))
    return Monitor(chosen, device, every=every, flops_per_token=flops_per_token, peak_flops=peak)


def _peak(device: torch.device, given: float | Literal["measure"] | None) -> float | None:
    if given == "measure":
        return measured_flops(device)
    return peak_flops(device) if given is None else float(given)


_PAGE = os.sysconf("SC_PAGE_SIZE")
_MOST_WAITING = 2  # losses that are not read yet
_MEMORY_SECONDS = 0.1
"""Between two reads of the host's memory: one takes as long as the rest of a call of ``step``."""


def _resident_bytes() -> int:
    """Now where Linux tells it, else the largest so far."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
