"""Which module of a model made an autograd node, by the sequence number of the node."""

from __future__ import annotations

import bisect
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from vescale.compat import current_autograd_node, node_sequence, sequence_number

__all__ = ["MAX_LENGTH", "ModuleTimeline"]

# Marks that are kept, equal forwards counted once. Nodes of forwards before these belong to no module.
MAX_LENGTH = 4_000_000


@dataclass(frozen=True, slots=True)
class _Forward:
    """Nodes from ``start`` to before ``end``: ``wheres[i]`` made those from ``start + numbers[i]`` on."""

    start: int
    end: int
    marks: tuple[tuple[int, ...], tuple[Any, ...]]


class _Thread:
    def __init__(self) -> None:
        self.numbers: list[int] = []  # of the forward that is running
        self.wheres: list[Any] = []
        self.forwards: list[_Forward] = []


class ModuleTimeline:
    """The sequence numbers at which threads went from one module to another, of all models in the process.

    Each thread counts its nodes by itself. Models that run inside of others, and interleaved ones, need no distinction: a
    thread is in one module at a time. Forwards of a model usually are alike, and then share what is kept of them.

    ``csrc/timeline.h`` is the same in C++, and knows the thread of each node. Python does not: where several threads have
    used a number in forwards, the thread that asks comes first, then the one that ran a forward last.
    """

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        self._max_length = max_length
        self._length = 0
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._order: deque[_Thread] = deque()  # of the finished forwards, the oldest first
        self._patterns: dict[Any, list[Any]] = {}  # marks -> [the same marks, how many forwards have them]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._length

    def mark(self, where: Any) -> None:
        """From now on this thread runs the module of ``where``; None: it has left the outermost model."""
        thread = self._thread()
        number = sequence_number()
        if where is None:
            self._close(thread, number)
        elif thread.numbers and thread.numbers[-1] == number:
            thread.wheres[-1] = where
        elif not thread.wheres or thread.wheres[-1] is not where:
            thread.numbers.append(number)
            thread.wheres.append(where)

    def of_current_node(self) -> Any:
        """``where`` of the node that this thread evaluates in backward; None: of no model, or there is no such node."""
        node = current_autograd_node()
        return None if node is None else self.of_node(node)

    def of_node(self, node: Any) -> Any:
        number, own = node_sequence(node), self._thread()
        with self._lock:
            others = [thread for thread in reversed(self._order) if thread is not own]
        for thread in (own, *dict.fromkeys(others), *self._threads):
            found = _find(thread, number)
            if found is not None:
                return found
        return None

    def _thread(self) -> _Thread:
        found: _Thread | None = getattr(self._local, "thread", None)
        if found is None:
            found = self._local.thread = _Thread()
            self._threads.append(found)
        return found

    def _close(self, thread: _Thread, number: int) -> None:
        numbers, wheres = thread.numbers, thread.wheres
        thread.numbers, thread.wheres = [], []
        if not numbers or numbers[0] == number:  # it has made no nodes
            return
        start = numbers[0]
        marks = tuple(each - start for each in numbers), tuple(wheres)
        with self._lock:
            pattern = self._patterns.setdefault(marks, [marks, 0])
            if pattern[1] == 0:
                self._length += len(numbers)
            pattern[1] += 1
            thread.forwards.append(_Forward(start, number, pattern[0]))
            self._order.append(thread)
            self._length += 1
            while self._length > self._max_length and len(self._order) > 1:
                self._forget()

    def _forget(self) -> None:
        marks = self._order.popleft().forwards.pop(0).marks
        self._length -= 1
        pattern = self._patterns[marks]
        pattern[1] -= 1
        if pattern[1] == 0:
            self._length -= len(marks[0])
            del self._patterns[marks]


def _find(thread: _Thread, number: int) -> Any:
    numbers, wheres, start = thread.numbers, thread.wheres, 0
    if not numbers or number < numbers[0]:
        forwards = thread.forwards
        index = bisect.bisect_right(forwards, number, key=lambda forward: forward.start) - 1
        if index < 0 or number >= forwards[index].end:
            return None
        start = forwards[index].start
        numbers, wheres = forwards[index].marks  # type: ignore[assignment]
    elif number == 2**64 - 1:  # of leaves
        return None
    return wheres[bisect.bisect_right(numbers, number - start) - 1]
