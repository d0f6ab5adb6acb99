"""``comm_trace``: the collectives of a part of a program, as a table, a timeline and for assertions."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from vescale.agreement import Round
from vescale.comm import Observer, Operation, axes_of, current_requester, name_group, observe
from vescale.compat import is_alone
from vescale.compat.consoles import Console, Table
from vescale.debug._locations import running_place
from vescale.errors import Coded

# The interval at which works on devices, whose end is not notified, are polled while the trace is read.
_PATIENCE_SECONDS = 30.0


class CommBudgetError(Coded, AssertionError, code="VS1401"):
    """A program has communicated more, or less, than asserted."""


class CommTrace(Observer):
    """The operations of this rank, in the order in which they started.

    Attributes:
        operations: see :class:`vescale.comm.Operation`. Groups of one rank, which move nothing, are left out.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def started(self, operation: Operation) -> None:
        if len(operation.ranks) == 1:
            return
        if not operation.line:
            place = running_place()
            operation.module, operation.phase, operation.line = place.module or "", place.phase, place.line
            operation.stage = place.stage
        if not operation.requester:
            operation.requester = current_requester()
        self.operations.append(operation)

    def count(self, op: str | None = None, axis: str | None = None) -> int:
        """The number of operations, of one kind and over one axis (``"tp"``, ``"dp,tp"``) if given.

        Args:
            op: a kind, such as ``"all_reduce"``. None: all.
            axis: None: all.
        """
        return sum(1 for operation in self._chosen(op, axis))

    def bytes(self, op: str | None = None, axis: str | None = None) -> int:
        """The number of bytes that this rank received from others in them.

        Args:
            op, axis: as of :meth:`count`.
        """
        return sum(operation.bytes for operation in self._chosen(op, axis))

    def _chosen(self, op: str | None, axis: str | None) -> Iterator[Operation]:
        for operation in self.operations:
            if op in (None, operation.op) and axis in (None, operation.axes):
                yield operation

    def assert_comms(self, *, axis: str | None = None, only: bool = False, **counts: int) -> None:
        """Raise CommBudgetError unless each named op ran this number of times (``all_reduce=8``), over ``axis`` if
        given.

        ``only``: and no other op did.

        Args:
            counts: a number for each op.
        """
        found = Counter(operation.op for operation in self._chosen(None, axis))
        wrong = [op for op, count in counts.items() if found[op] != count]
        others = [op for op in found if op not in counts] if only else []
        if not wrong and not others:
            return
        along = f" over axis {axis!r}" if axis is not None else ""
        texts = [f"{found[op]} {op}{along}, expected {counts.get(op, 0)}" for op in (*wrong, *others)]
        lines = [
            f"  {number} of {operation.requester or operation.module or operation.line or 'unknown'}: {operation.op} over "
            f"{operation.axes or list(operation.ranks)!r}, {operation.bytes} bytes"
            for operation, number in _grouped(op for o in (*wrong, *others) for op in self._chosen(o, axis))
        ]
        near = ""
        if axis is not None and not any(True for _ in self._chosen(None, axis)) and self.operations:
            axes = sorted({operation.axes for operation in self.operations if operation.axes}) or ["(unnamed)"]
            near = f"; the axes that were used are {axes}, and comm_trace(mesh) names those of a mesh"
        raise CommBudgetError(
            f"rank {dist.get_rank() if dist.is_initialized() else 0} ran {'; '.join(texts)}{near}. These ran:\n"
            + "\n".join(lines or ["  none"])
            + "\nChange the plan entry behind the excess (`vescale explain` shows the cost of each), or the expected "
            "number."
        )

    def table(self) -> Table:
        """One row for all operations with the same op, axis and requester."""
        table = Table(title="Collectives of this rank", title_justify="left")
        for name in ("op", "axis", "asked for by"):
            table.add_column(name, overflow="fold")
        for name in ("count", "bytes", "seconds"):
            table.add_column(name, justify="right")
        self.wait()
        rows: dict[tuple[str, str, str], list[Operation]] = {}
        for operation in self.operations:
            rows.setdefault(
                (operation.op, operation.axes or f"{list(operation.ranks)}", _requester(operation)), []
            ).append(operation)
        for (op, axis, requester), found in rows.items():
            seconds = sum((operation.ended or operation.began) - operation.began for operation in found)
            table.add_row(op, axis, requester, str(len(found)), f"{sum(o.bytes for o in found):,}", f"{seconds:.4f}")
        return table

    def __str__(self) -> str:
        console = Console(width=160, markup=False, highlight=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()

    def wait(self) -> None:
        """Wait until every started operation has ended, but not for long; operations whose end is not observable are
        skipped."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline and any(not (o.is_mute or o.has_ended()) for o in self.operations):
            time.sleep(0.001)

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events of this rank: one complete event for each operation, on a track for each axis."""
        self.wait()
        rank = dist.get_rank() if dist.is_initialized() else 0
        tracks = {name: number for number, name in enumerate(dict.fromkeys(map(_track, self.operations)))}
        events: list[dict[str, Any]] = [_named("process", rank, 0, f"rank {rank}")]
        events += [_named("thread", rank, number, name) for name, number in tracks.items()]
        for operation in self.operations:
            begin = operation.began
            end = operation.ended if operation.ended is not None else begin
            events.append(
                {
                    "ph": "X",
                    "name": f"{operation.op} {_requester(operation)}".strip(),
                    "cat": operation.op,
                    "pid": rank,
                    "tid": tracks[_track(operation)],
                    "ts": begin * 1e6,
                    "dur": max(0.0, end - begin) * 1e6,
                    "args": {
                        "axis": operation.axes,
                        "ranks": list(operation.ranks),
                        "number": operation.number,
                        "bytes": operation.bytes,
                        "asked for by": operation.requester,
                        "module": operation.module,
                        "phase": operation.phase,
                        "line": operation.line,
                        "stage": operation.stage,
                    },
                }
            )
        return events

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline of all ranks to one file, for ui.perfetto.dev or chrome://tracing; call it on every rank.

        Ranks send their events to the first rank through the store, without a collective. Times are those of each host's
        clock.

        Args:
            path: of the file, which the first rank writes.
        """
        own = self.events()
        everyone = [own]
        if dist.is_initialized() and dist.get_world_size() > 1 and not is_alone():
            rounds = Round(range(dist.get_world_size()), f"trace {os.fspath(path)}")

            def take(texts: Sequence[str]) -> str:
                everyone[:] = map(json.loads, texts)
                return ""

            rounds.lead(lambda: json.dumps(own), take, lambda: f"writing a trace to {os.fspath(path)}")
        if not dist.is_initialized() or dist.get_rank() == 0:
            first = min((e["ts"] for events in everyone for e in events if e["ph"] == "X"), default=0.0)
            for event in (e for events in everyone for e in events if e["ph"] == "X"):
                event["ts"] -= first
            data = {"traceEvents": [e for events in everyone for e in events], "displayTimeUnit": "ms"}
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(data))


@contextlib.contextmanager
def comm_trace(mesh: DeviceMesh | None = None, *, save: str | os.PathLike[str] | None = None) -> Iterator[CommTrace]:
    """Collect every collective that this process starts inside the context, of this library, stock PyTorch (DTensor,
    FSDP2, DDP) and user code, in forward and backward.

    A collective of this library is one operation, even if the backend runs several (gloo has no reduce-scatter: it runs
    an all-to-all and a sum). While it is inactive, nothing is installed.

    Args:
        mesh: names its groups by its axes, unless they have names.
        save: the path for :meth:`CommTrace.save`, which is called unless the block raises.

    Communication: none, except that ``save`` uses the store.
    """
    if mesh is not None and mesh.get_coordinate() is not None:
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        for axis, name in enumerate(names):
            if not axes_of(mesh.get_group(axis)):
                name_group(mesh.get_group(axis), name)
    trace = CommTrace()
    end = observe(trace)
    try:
        yield trace
    finally:
        end()
    if save is not None:
        trace.save(save)


@contextlib.contextmanager
def assert_comms(
    *, axis: str | None = None, only: bool = False, mesh: DeviceMesh | None = None, **counts: int
) -> Iterator[CommTrace]:
    """A block that must run this number of the named collectives (``all_reduce=8``) on this rank, over ``axis`` if
    given.

    Raises CommBudgetError when the block is left, naming what ran and who asked for it. See :meth:`CommTrace.assert_comms`.

    Args:
        only: whether any other op is an error.
        mesh: the mesh whose axes are named.
        counts: a number for each op.
    """
    with comm_trace(mesh) as trace:
        yield trace
    trace.assert_comms(axis=axis, only=only, **counts)


def _requester(operation: Operation) -> str:
    module = operation.module if operation.module and operation.module not in operation.requester else ""
    stage = operation.stage.partition(",")[0]
    stage = "" if stage and operation.requester.startswith(stage) else stage
    phase = ", ".join(part for part in (operation.phase, stage) if part)
    phase = f"({phase})" if phase else ""
    return " ".join(part for part in (operation.requester or module, phase) if part) or operation.line


def _grouped(operations: Iterator[Operation]) -> list[tuple[Operation, int]]:
    found: dict[tuple[str, str, str, int], list[Operation]] = {}
    for operation in operations:
        found.setdefault((operation.op, operation.axes, _requester(operation), operation.bytes), []).append(operation)
    return [(same[0], len(same)) for same in found.values()]


def _track(operation: Operation) -> str:
    return f"axis {operation.axes}" if operation.axes else f"ranks {list(operation.ranks)}"


def _named(kind: str, rank: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": rank, "tid": number, "args": {"name": name}}
