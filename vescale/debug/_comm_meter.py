"""Counts, bytes and seconds of collectives by mesh axis, without keeping the collectives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from vescale.comm import Observer, Operation, observe


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
