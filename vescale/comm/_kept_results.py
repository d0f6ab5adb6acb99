"""Results of collectives that are kept while a forward runs, and taken instead of a collective when it runs again.

Activation checkpointing computes a part of a forward again in backward. What ranks have sent to each other in between is
not sent again: the outermost call of a function that communicates (:func:`keeps_result`) is kept by its number. A result
that has been written to since is not what was received, and is communicated again.

Writes are noted by memory while the forward runs, because some tensors share memory and no version (the parts of
``unsafe_chunk``, which recurrent layers write to; ``_unsafe_view``, by which ``x @ w`` returns its product). After it,
versions tell of them: of what is kept, and of what the forward returned.

Ranks must write to the same results: those that do not would not take part in that.

Writes are also counted, so that a recomputation does not end before the last of them: by way of ``.data``, what is saved for
backward may be written to after it has been saved. Writes to plain tensors are not noted; when local tensors are handed out,
there may be any.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import torch

from vescale.comm._pending import Pending
from vescale.compat import detached_below_autograd, own_part, versions

_P = ParamSpec("_P")


class _Thread(threading.local):
    """Attributes: kept: the results of the forward that this thread is in, if they are kept."""

    def __init__(self) -> None:
        self.kept: KeptResults | None = None


_THREAD = _Thread()
KEEPERS: list[KeptResults] = []
"""Those of forwards that are running, on any thread: then conversions are planned and run in Python, which asks."""


class KeptTensors:
    """Tensors that are kept until the forward runs again, and whether their memory has been written to since."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._versions: list[tuple[torch.Tensor, tuple[int, ...]]] = []
        self._is_written = False

    def watch(self, *tensors: torch.Tensor) -> None:
        """Tensors in this memory; none of them has a graph."""
        self._versions += [(tensor, versions(tensor)) for tensor in tensors]

    def note_write(self) -> None:
        self._is_written = True

    @property
    def is_unwritten(self) -> bool:
        """Not while nothing is watched: a collective may not have ended."""
        return (
            bool(self._versions)
            and not self._is_written
            and all(versions(tensor) == version for tensor, version in self._versions)
        )


def _memory(tensor: torch.Tensor) -> int | None:
    """What the tensors of a storage have in common; None for a tensor without one."""
    try:
        return int(own_part(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other subclasses
        return None


class KeptResults:
    """The results of one forward, in the order of their collectives. ``keeps=False``: nothing is, and all runs again.

    Attributes:
        is_communicating: a collective runs, with the local steps around it: no ops of the model.
    """

    def __init__(self, *, keeps: bool = True, on_kept: Callable[[Sequence[torch.Tensor]], None] | None = None) -> None:
        self.is_communicating = False
        self._keeps, self._on_kept = keeps, on_kept
        self._results: list[KeptTensors | None] = []
        self._by_memory: dict[int, list[KeptTensors]] = {}
        self._next: int | None = None  # while they are taken: which one
        self._moves = False  # ranks of a group have communicated since the running call began
        self._num_writes = [0, 0]  # in the first forward, and in the one that runs again
        self._hands_out_locals = False

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """The forward runs for the first time."""
        self._results.clear()
        self._by_memory.clear()
        self._next, self._num_writes, self._hands_out_locals = None, [0, 0], False
        with self._entered():
            yield

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """It runs again."""
        self._next = self._num_writes[1] = 0
        with self._entered():
            yield

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before, _THREAD.kept = _THREAD.kept, self
        KEEPERS.append(self)
        self.is_communicating = False
        try:
            yield
        finally:
            _THREAD.kept = before
            KEEPERS.remove(self)

    def pending(self, call: Callable[[], Pending], out: torch.Tensor | None) -> Pending:
        if self.is_communicating:
            return call()
        found = self._take()
        if found is not None:
            (result,) = found.tensors
            return Pending(result.detach() if out is None else out.copy_(result))
        pending, moves = self._run(call)
        kept = self._keep([pending.out]) if moves else self._keep(())
        return Pending(pending.out, [pending], lambda: self.hold(kept)) if kept is not None else pending

    def tensors(self, call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        if self.is_communicating:
            return call()
        found = self._take()
        if found is not None:
            return tuple(tensor.detach() for tensor in found.tensors)
        result, moves = self._run(call)
        kept = self._keep(result if moves else ())
        if kept is not None:
            self.hold(kept)
        return result

    def _take(self) -> KeptTensors | None:
        if self._next is None:
            return None
        found = self._results[self._next] if self._next < len(self._results) else None
        self._next += 1
        return found if found is not None and found.is_unwritten else None

    def _run(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        self.is_communicating, self._moves = True, False
        try:
            return call(), self._moves
        finally:
            self.is_communicating = False

    def _keep(self, tensors: Sequence[torch.Tensor]) -> KeptTensors | None:
        if self._next is not None:
            return None  # the first forward has decided
        if not tensors or not self._keeps:
            self._results.append(None)
            return None
        kept = KeptTensors(tensors)
        self._results.append(kept)
        if self._on_kept is not None:
            self._on_kept(tensors)
        return kept

    def hold(self, kept: KeptTensors) -> None:
        """From here on its tensors have the values that are kept."""
        kept.watch(*kept.tensors)
        for tensor in kept.tensors:
            memory = _memory(tensor)
            if memory is not None:
                self._by_memory.setdefault(memory, []).append(kept)

    def watch(self, holder: torch.Tensor) -> None:
        """If it is in memory that is kept, what is written to ``holder`` afterwards is written to that."""
        memory = _memory(holder) if self._by_memory else None
        for kept in self._by_memory.get(memory, ()) if memory is not None else ():
            kept.watch(detached_below_autograd(holder))  # which has the version of the holder, and not its graph

    def __bool__(self) -> bool:
        """While it runs again: are all writes of the first forward repeated? PyTorch asks this, as ``early_stop``."""
        return not self._hands_out_locals and self._num_writes[0] == self._num_writes[1]

    def note_locals(self) -> None:
        """Local tensors are handed out, which plain ops may write to."""
        self._hands_out_locals = True

    def note_handed_out(self, tensor: torch.Tensor) -> None:
        """The program may write to this memory unseen, until the forward runs again."""
        self.note_locals()
        for kept in self._by_memory.get(_memory(tensor) or 0, ()):
            kept.note_write()

    def note_write(self, tensor: torch.Tensor) -> None:
        self._num_writes[self._next is not None] += 1
        memory = _memory(tensor) if self._by_memory else None
        for kept in self._by_memory.get(memory, ()) if memory is not None else ():
            kept.note_write()

    def note_communication(self, num_ranks: int) -> None:
        self._moves = self._moves or num_ranks > 1


def note_communication(num_ranks: int) -> None:
    """A collective among so many ranks begins on this thread."""
    if _THREAD.kept is not None:
        _THREAD.kept.note_communication(num_ranks)


def keeps_result(function: Callable[_P, Pending]) -> Callable[_P, Pending]:
    """A function that communicates, whose result is kept and taken; ``out=`` is written in any case."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> Pending:
        kept = _THREAD.kept
        if kept is None:
            return function(*args, **kwargs)
        out: Any = kwargs.get("out")
        return kept.pending(lambda: function(*args, **kwargs), out)

    return run


def keep_tensors(call: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What ``call()`` returns, of which several collectives and the work between them are a part."""
    kept = _THREAD.kept
    return call() if kept is None else kept.tensors(call)


def watch_holder(holder: torch.Tensor) -> None:
    """The tensor subclass ``holder`` may be around a tensor that is kept: what is written to one of them is written to both,
    but may count in the version of the holder only."""
    if _THREAD.kept is not None:
        _THREAD.kept.watch(holder)


def note_write(tensor: torch.Tensor) -> None:
    """An op has written to the memory of ``tensor``."""
    if _THREAD.kept is not None:
        _THREAD.kept.note_write(tensor)


def note_locals() -> None:
    """Local tensors of the running forward are handed out to code of the model."""
    if _THREAD.kept is not None:
        _THREAD.kept.note_locals()


@contextlib.contextmanager
def outside_of_kept() -> Iterator[KeptResults | None]:
    """Collectives inside belong to no forward: gathers of parameters."""
    kept, _THREAD.kept = _THREAD.kept, None
    before = kept.is_communicating if kept is not None else False
    if kept is not None:
        kept.is_communicating = True
    try:
        yield kept
    finally:
        _THREAD.kept = kept
        if kept is not None:
            kept.is_communicating = before
