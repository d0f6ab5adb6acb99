"""Where a monitor's records go: a line on the console, JSON lines, TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from vescale.comm import bytes_text
from vescale.debug._comm_meter import AxisTraffic
from vescale.errors import MissingPackageError

__all__ = ["ConsoleLines", "JsonLines", "Output", "StepRecord", "TensorBoard", "require_tensorboard"]


@dataclass
class StepRecord:
    """One training step, as this rank saw it.

    Attributes:
        step: its number.
        loss: as given to :meth:`Monitor.step`; None if it was not.
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
