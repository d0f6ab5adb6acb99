"""One exchange between the ranks of a job that does not keep their training back: through the store, on a thread."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeGuard

import torch.distributed as dist

from vescale.checkpoint._error_text import as_text, from_text
from vescale.checkpoint._replicas import has_other_ranks
from vescale.comm import LateRanksWarning, WaitNotice, wait_limit
from vescale.compat import default_timeout, own_connection
from vescale.errors import CheckpointError, SaveFailedError

# What a message begins with: of a rank that has something to say, and of one that has failed.
_HAS_COME, _FAILED = "+", "-"

_EVERY_RANK = "every rank has to call it, not only some as in `if rank == 0:`, unless a rank is gone or hangs"

# After this time, ranks that have not come are named in a warning.
_PATIENCE = timedelta(seconds=3)

# By default group: how many this rank has made, and connections to the store that no gathering uses at the moment.
_COUNTERS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
_CONNECTIONS: weakref.WeakKeyDictionary[Any, list[dist.Store]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Gathering:
    """Rounds in which the first rank gets a message of each, does something, and tells all how it went.

    Made by all ranks in the same order, on the thread that has their process group; rounds may run on another thread.

    Args:
        call: what the user has called, the same on all ranks: ranks that come by different calls get an error.

    ``has_failed``: a round has ended with an error, on all ranks that have come to it.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self.has_failed = False
        self._number = 0
        self._rounds = itertools.count()
        self._alone = not has_other_ranks()
        self.rank, self.world = (0, 1) if self._alone else (dist.get_rank(), dist.get_world_size())
        if not self._alone:
            with _LOCK:
                counter = _COUNTERS.setdefault(dist.group.WORLD, itertools.count())
                unused = _CONNECTIONS.setdefault(dist.group.WORLD, [])
                connection = unused.pop() if unused else None
            # A new connection looks the host's name up, which may take seconds.
            self._store = connection if connection is not None else own_connection()
            weakref.finalize(self, unused.append, self._store).atexit = False
            self._timeout: timedelta = wait_limit() or default_timeout()
            self._number = next(counter)

    def round(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        """``first`` runs on the first rank with all messages, in rank order; every rank gets what it returns.

        ``message``: a function is called once the others can see that this rank has come. Ranks that have not come
        for 3 seconds are named in a warning.

        Raises CheckpointError where ``message`` or ``first`` raised anything, or ranks do not come; on every rank that
        does. What is no Exception (Ctrl-C) is raised at once where it is, and the others hear of it.
        """
        if self._alone:
            return self._answer_alone(message, first)
        place = f"vescale checkpoint {self._number} {next(self._rounds)}"
        comings = [f"{place} came {rank}" for rank in range(self.world)]
        keys = [f"{place} {rank}" for rank in range(self.world)]
        outcome = f"{place} outcome"
        self._store.set(comings[self.rank], self._call)
        failure: BaseException | None = None
        try:
            own = _HAS_COME + (message if isinstance(message, str) else message())
        except BaseException as error:
            failure, own = error, _FAILED + as_text(error)
        if self.rank == 0:
            answer = self._lead(keys, comings, outcome, own, first, failure)
        else:
            self._store.set(keys[self.rank], own)
            answer = {"error": own[1:]} if _is_interrupt(failure) else self._follow(comings, outcome)
        self._leave([*keys[1:], *comings, outcome], f"{place} left")
        if "error" in answer:
            self.has_failed = True
            if _is_interrupt(failure):
                raise failure
            raise from_text(answer["error"]) from failure
        return answer

    def _answer_alone(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            return first([message if isinstance(message, str) else message()])
        except BaseException as error:
            self.has_failed = True
            if _is_interrupt(error) or isinstance(error, CheckpointError):
                raise
            raise from_text(as_text(error)) from error

    def _follow(self, comings: Sequence[str], outcome: str) -> dict[str, Any]:
        try:
            absence = self._wait([outcome], comings)
        except RuntimeError as error:  # the store is gone; store types have no common error class
            raise SaveFailedError("rank 0 does not answer: it is gone") from error
        if absence is None:
            return dict(json.loads(self._store.get(outcome)))
        absence = absence or f"rank 0 did not answer within {self._timeout}: it is gone, or hangs"
        answer = {"error": as_text(SaveFailedError(absence))}
        self._store.compare_set(outcome, "", json.dumps(answer))  # a rank that comes later learns of it
        return answer

    def _lead(
        self,
        keys: Sequence[str],
        comings: Sequence[str],
        outcome: str,
        message: str,
        first: Callable[[Sequence[str]], dict[str, Any]],
        failure: BaseException | None,
    ) -> dict[str, Any]:
        try:
            if _is_interrupt(failure):
                raise failure
            absence = self._wait(keys[1:], comings)
            if self._store.check([outcome]):  # another rank has stopped waiting
                return dict(json.loads(self._store.get(outcome)))
            if absence is not None:
                gone = [rank for rank, key in enumerate(keys) if rank and not self._store.check([key])]
                absence = absence or f"ranks {gone} did not answer within {self._timeout}: they are gone, or hang"
                answer = {"error": as_text(SaveFailedError(absence))}
            else:
                calls = [self._store.get(key).decode() for key in comings]
                answer = _answered(calls, [message, *(self._store.get(key).decode() for key in keys[1:])], first)
            self._store.set(outcome, json.dumps(answer))
        except BaseException as error:
            self.has_failed = True
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._store.set(outcome, json.dumps({"error": as_text(error)}))
            raise
        return answer

    def _wait(self, keys: Sequence[str], comings: Sequence[str]) -> str | None:
        """None when the keys are there. After the time limit, or where ranks wait for each other in different places: what
        the ranks that have not come should do, or "" if all have.

        Raises RuntimeError if the store is gone.
        """
        end = time.monotonic() + self._timeout.total_seconds()
        notice, quietly, has_warned = None, False, False
        try:
            while not self._come_in(keys, min(_PATIENCE.total_seconds(), end - time.monotonic()), quietly=quietly):
                quietly = True
                late = {rank: key for rank, key in enumerate(comings) if not self._store.check([key])}
                if time.monotonic() >= end:
                    return f"{self._late(late)} within {self._timeout}; {_EVERY_RANK}" if late else ""
                if not late:
                    continue
                notice = notice or WaitNotice(self._store, self.rank, self._call, range(self.world))
                if elsewhere := notice.cross_wait(late):
                    return f"{self._late(late)}, because ranks wait for each other: {elsewhere}; {_EVERY_RANK}"
                if not has_warned and min(set(range(self.world)) - late.keys()) == self.rank:  # one for all
                    text = f"{self._late(late)} for {_PATIENCE.seconds} s, and others wait until {self._timeout} have passed"
                    warnings.warn(f"{text}; {_EVERY_RANK}", LateRanksWarning, stacklevel=2)
                has_warned = True
            return None
        finally:
            if notice is not None:
                notice.withdraw()

    def _come_in(self, keys: Sequence[str], seconds: float, *, quietly: bool) -> bool:
        """Whether the keys are there after at most so many seconds. ``quietly``: looks now and then, because the store
        writes lines to stderr for each wait in vain."""
        if not quietly:
            try:
                self._store.wait(list(keys), timedelta(seconds=max(seconds, 0.001)))
            except RuntimeError:  # store types have no common error class; one that is gone raises again here
                return bool(self._store.check(list(keys)))
            return True
        end = time.monotonic() + seconds
        while not self._store.check(list(keys)):
            if time.monotonic() >= end:
                return False
            time.sleep(0.05)
        return True

    def _late(self, late: Iterable[int]) -> str:
        return f"ranks {sorted(late)} did not come to {self._call}"

    def _leave(self, keys: Sequence[str], counter: str) -> None:
        """The last rank that leaves deletes the keys."""
        if self._store.add(counter, 1) == self.world:
            for key in (*keys, counter):
                self._store.delete_key(key)


def _is_interrupt(failure: BaseException | None) -> TypeGuard[BaseException]:
    return failure is not None and not isinstance(failure, Exception)


def _answered(
    calls: Sequence[str], messages: Sequence[str], first: Callable[[Sequence[str]], dict[str, Any]]
) -> dict[str, Any]:
    """What ``first`` returns for the messages of all ranks, or ``{"error": ...}``; as JSON has it."""
    if len(set(calls)) > 1:
        places = ", ".join(f"rank {rank} in {call}" for rank, call in enumerate(calls))
        return {"error": as_text(SaveFailedError(f"ranks are in different calls: {places}; {_EVERY_RANK}"))}
    failed = [rank for rank, message in enumerate(messages) if message.startswith(_FAILED)]
    if failed:
        return {"error": as_text(from_text(messages[failed[0]][1:], f"rank {failed[0]}: "))}
    try:
        return dict(json.loads(json.dumps(first([message[1:] for message in messages]))))
    except Exception as error:
        return {"error": as_text(error)}


def first_rank_decides(call: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first rank's ``decide()`` returns, on every rank; called by all of them, in ``call`` of the user."""
    return Gathering(call).round("", lambda _: decide())


@contextlib.contextmanager
def together(call: str) -> Iterator[None]:
    """What the block raises on one rank, all ranks raise behind it; entered by all of them, in ``call`` of the user."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error

    def message() -> str:
        if failure is not None:
            raise failure
        return ""

    try:
        Gathering(call).round(message, lambda _: {})
    except CheckpointError as told:
        if failure is not None and (not isinstance(failure, CheckpointError) or not has_other_ranks()):
            raise failure from None
        raise told from failure
