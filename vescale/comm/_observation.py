"""Observes collectives while they run: all that this process starts, from any code.

An :class:`Operation` is one request: a reduce-scatter of ``vescale.comm`` that runs on gloo as an all-to-all and a local
sum is one operation, and so is each other call of ``torch.distributed``. Without an observer, nothing is installed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm._long_waits import look, waits_for_message
from vescale.compat import OBSERVATION, group_description, install_part, on_completion, require, uninstall_part


@dataclass(eq=False)
class Operation:
    """A collective on this rank, from its start.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``send``, ...
        number: how many operations of the group this rank started before, while observed; ranks with equal numbers wait for
            each other.
        group: the process group's name, the same on all its ranks; ranks: its global ranks; axes: the mesh axes it spans,
            joined with ``,``, or "".
        bytes: the bytes that this rank receives from others, as in :class:`CommRecord`.
        requester: the requester, if known.
        began, ended: in seconds of ``time.time()``; ``ended`` is None while it runs.
        module, phase, line: the module whose forward or backward started it, and the line of the program; set by observers.
        stage: ``stage 1, micro-batch 0``, in a pipeline; set by observers.
        peer: of a message that :func:`expect_message` has announced, the global rank at its other end.
    """

    op: str
    number: int
    group: str
    ranks: tuple[int, ...]
    axes: str
    bytes: int
    requester: str = ""
    began: float = field(default_factory=time.time)
    ended: float | None = None
    module: str = ""
    phase: str = ""
    line: str = ""
    stage: str = ""
    peer: int | None = None
    parts: list[Any] = field(default_factory=list, repr=False)
    """Works that have not ended."""
    is_issued: bool = False
    """Whether the call that started it has returned."""
    is_mute: bool = False
    """Its works never tell that they have ended. They count as ended when this rank starts another collective."""

    def work_ended(self, work: Any) -> None:
        """Called by the thread that ended one of its works."""
        self.parts = [other for other in self.parts if other is not work]
        self.has_ended()

    def has_ended(self) -> bool:
        """Check the works and release those that have ended: they may hold tensors."""
        if self.ended is None and self.is_issued:
            self.parts = [work for work in self.parts if not work.is_completed()]
            if not self.parts:
                self.ended = time.time()
                for observer in (*OBSERVERS, *METERS):
                    observer.ended(self)
        return self.ended is not None


class Part:
    """A scope: the calls of ``torch.distributed`` inside, on this thread, are one operation."""

    __slots__ = ("before", "num_bytes", "op", "operation", "requester")

    def __init__(self, op: str, num_bytes: int, requester: str) -> None:
        self.op, self.num_bytes, self.requester = op.removesuffix("_v"), num_bytes, requester
        self.operation: Operation | None = None

    def __enter__(self) -> None:
        self.before = getattr(_THREAD, "part", None)
        _THREAD.part = self

    def __exit__(self, *_: object) -> None:
        _THREAD.part = self.before
        if self.operation is not None:
            self.operation.is_issued = True
            self.operation.has_ended()


class _Outside:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


AS_PART = _Outside()
"""The scope while nobody observes."""


class Observer:
    """Receives operations; its methods run on the thread that starts them.

    Attributes:
        timeout: in seconds, used for collectives instead of their group's timeout; None: no change.
        needs_requesters: False: who asked for a collective need not be known. C++ helpers then keep calling collectives, and
            an operation that such a helper starts has the name of the call and no requester.
    """

    timeout: float | None = None
    needs_requesters = True

    def started(self, operation: Operation) -> None:
        """Called before the operation runs. All observers see the fields that are set here."""

    def ended(self, operation: Operation) -> None:
        """Called when this process has found that the operation has ended, on any thread; perhaps twice, and not for
        operations that fail."""

    def waits(self, operation: Operation) -> None:
        """Called when this rank has waited for others for a while, and not in a collective; see :func:`tell_wait`."""


_SILENT = ("send", "recv")
"""Calls whose works have ended when they have been waited for, and tell nobody."""
_THREAD = threading.local()
_LOCK = threading.Lock()
# They stay the same lists.
OBSERVERS: list[Observer] = []
METERS: list[Observer] = []
"""Observers that do not need requesters."""
_COUNTS: dict[str, int] = {}
_EXPECTED: dict[tuple[int, int], tuple[str, int]] = {}
_MAX_EXPECTED = 4096
_UNTOLD: list[Operation] = []
"""Operations made of silent works, or mute, that may be running."""
# Group names are unique in a process and outlive their groups.
_AXES: dict[str, str] = {}


def tell_wait(op: str, number: int, group: str, ranks: Sequence[int]) -> Operation | None:
    """Tell the observers with a time limit of a wait for other ranks that is no collective.

    Returns what they were told of, whose ``ended`` the caller sets; None: nobody watches.
    """
    watching = [observer for observer in OBSERVERS if observer.timeout is not None]
    if not watching:
        return None
    operation = Operation(op, number, group, tuple(ranks), "", 0)
    for observer in watching:
        observer.waits(operation)
    return operation


def observe(observer: Observer) -> Callable[[], None]:
    """Pass every collective of this process to ``observer`` from now on; the returned function ends that."""
    observers = OBSERVERS if observer.needs_requesters else METERS
    with _LOCK:
        if not (OBSERVERS or METERS):
            require(OBSERVATION)
            _COUNTS.clear()
            _UNTOLD.clear()
            install_part("observation", _run)
        observers.append(observer)

    def end() -> None:
        with _LOCK:
            if observer in observers:
                observers.remove(observer)
                if not (OBSERVERS or METERS):
                    uninstall_part("observation")
                    for operation in _UNTOLD:  # works hold tensors
                        operation.parts = []
                    _UNTOLD.clear()

    return end


def wait_for_message(work: Any) -> None:
    """``work.wait()`` for a message, whose end is not observable otherwise, with the observers' timeout."""
    with waits_for_message():
        limit = _time_limit(OBSERVERS) if OBSERVERS else None
        try:
            work.wait(timedelta(seconds=limit)) if limit is not None else work.wait()
        except RuntimeError:
            look(None, "a collective", in_vain=True)
            raise
    if not (OBSERVERS or METERS):
        return
    with _LOCK:
        _UNTOLD[:] = [operation for operation in _UNTOLD if not operation.has_ended()]


def expect_message(tensor: torch.Tensor, who: str, peer: int) -> None:
    """Before other code sends or receives ``tensor``: who asks for that, and the global rank at the other end."""
    if OBSERVERS:
        with _LOCK:
            if len(_EXPECTED) >= _MAX_EXPECTED:
                _EXPECTED.clear()
            _EXPECTED[tensor.data_ptr(), tensor.nbytes] = who, peer


def _end_mute() -> None:
    if any(operation.is_mute for operation in _UNTOLD):
        with _LOCK:
            for operation in _UNTOLD:
                if operation.is_mute:
                    operation.parts = []
            _UNTOLD[:] = [operation for operation in _UNTOLD if not operation.has_ended()]


def _time_limit(observers: Sequence[Observer]) -> float | None:
    return max((observer.timeout for observer in observers if observer.timeout is not None), default=None)


def name_group(group: dist.ProcessGroup, axes: str) -> None:
    """Record the mesh axes that a process group spans."""
    _AXES[group.group_name] = axes


def axes_of(group: dist.ProcessGroup) -> str:
    """The mesh axes that a group spans, joined with ``,``; "" if they are not known."""
    known = _AXES.get(group.group_name)
    return known if known is not None else group_description(group).partition("mesh_")[2]


def _run(
    name: str,
    group: dist.ProcessGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    call: Callable[[float | None], Any],
) -> Any:
    _end_mute()
    observers = [*OBSERVERS, *METERS]
    part: Part | None = getattr(_THREAD, "part", None)
    operation = part.operation if part is not None else None
    if operation is None:
        operation = _new(name, group, inputs, outputs, part)
        for observer in observers:
            observer.started(operation)
    try:
        result, work = call(_time_limit(observers))
    except BaseException:
        operation.ended = time.time()
        raise
    if work is not None:
        operation.parts.append(work)
        if all(tensor.device.type == "cpu" for tensor in (*inputs, *outputs)) and (inputs or outputs):
            is_told = on_completion(work, lambda: operation.work_ended(work))
            operation.is_mute = not is_told and name not in _SILENT
        if operation.is_mute or (part is not None and name in _SILENT and len(operation.parts) == 1):
            with _LOCK:
                _UNTOLD.append(operation)
    if part is None:
        operation.is_issued = True
        operation.has_ended()
    return result


def _new(
    name: str,
    group: dist.ProcessGroup,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    part: Part | None,
) -> Operation:
    group_name = str(group.group_name)
    with _LOCK:
        number = _COUNTS.get(group_name, 0)
        if part is not None or name not in _SILENT:
            _COUNTS[group_name] = number + 1
    ranks = tuple(dist.get_process_group_ranks(group))
    if part is None:
        received = received_bytes(name, len(ranks), inputs, outputs)
        operation = Operation(name, number, group_name, ranks, axes_of(group), received)
        if name in _SILENT and _EXPECTED:
            tensor = (*inputs, *outputs)[0]
            with _LOCK:
                found = _EXPECTED.pop((tensor.data_ptr(), tensor.nbytes), None)
            if found is not None:
                operation.requester, operation.peer = found
        return operation
    operation = Operation(part.op, number, group_name, ranks, axes_of(group), part.num_bytes, part.requester)
    part.operation = operation
    return operation


def received_bytes(name: str, num_ranks: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """The bytes that a rank receives from others by the usual algorithm."""
    given, got = (sum(t.numel() * t.element_size() for t in side) for side in (inputs, outputs))
    others = (num_ranks - 1) / num_ranks
    if name == "all_reduce":
        return math.ceil(2 * others * given)
    if name == "reduce_scatter":
        return math.ceil(others * given)
    if name in ("all_gather", "all_to_all", "gather"):
        return math.ceil(others * got)
    return 0 if name == "send" else got
