"""Rounds in which ranks compare what they are about to do, through the store: without collectives, which could mismatch."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.comm._long_waits import look
from vescale.comm._waiting_ranks import WaitNotice
from vescale.compat import default_store, default_timeout, is_alone
from vescale.errors import Coded, EnvironmentVariableError

__all__ = ["Consensus", "ConsensusError", "LateRanksWarning", "wait_limit"]


class ConsensusError(Coded, RuntimeError):
    """Other ranks did not come to a round in time; ``ranks``: which ones."""

    code = "VS1301"

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class LateRanksWarning(Coded, UserWarning):
    """Some ranks have come to a round and wait for others."""

    code = "VS1305"


# After this time, ranks that have not come are named in a warning.
_PATIENCE = timedelta(seconds=3)


# By default group, then by name: how many of that name this rank has made.
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Consensus:
    """Rounds among a fixed set of ranks. Every rank creates its instances, and runs their rounds, in the same order.

    If all messages are equal, which is the normal case, a round costs every rank three small requests to the store; the
    first rank reads a digest of each. Messages themselves are read only if they differ. The last rank that leaves a round
    deletes its keys; the keys of a round to which some rank did not come are kept, so that this rank learns of it when it
    comes.

    Args:
        ranks: global ranks, the same on each of them, including this one.
        name: of the round, unique to its caller.
        timeout: of a round; None: ``VESCALE_TIMEOUT`` seconds if that is set, else the timeout of the default group. After 3
            seconds a warning names the ranks that have not come.

    Attributes:
        place: a prefix of keys in the store that nobody else uses, the same on every rank.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta | None = None) -> None:
        self.ranks = tuple(sorted(ranks))
        self._index = self.ranks.index(dist.get_rank())
        self._timeout = timeout or wait_limit() or default_timeout()
        own = f"{name} {hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}"
        with _LOCK:
            counter = _COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(own, itertools.count())
        self.place = f"vescale {own} {next(counter)}"
        self._rounds = itertools.count()

    def exchange(self, message: bytes | Callable[[], bytes], about: Callable[[], str]) -> list[bytes]:
        """Every rank's message, in rank order.

        ``message``: a function is work that takes its time, and is called once the others can see that this rank has come:
        they are not warned of ranks that work.

        Raises ConsensusError with ``about()``, the purpose of the round, if a rank does not come in time.
        """
        if len(self.ranks) == 1 or is_alone():
            return [message if isinstance(message, bytes) else message()] * len(self.ranks)
        store, place = default_store(), f"{self.place} round {next(self._rounds)}"
        verdict = f"{place} verdict"
        digests = comings = [f"{place} digest {index}" for index in range(len(self.ranks))]
        if not isinstance(message, bytes):
            comings = [f"{place} came {index}" for index in range(len(self.ranks))]
            store.set(comings[self._index], "")
            message = message()
        store.set(digests[self._index], hashlib.sha256(message).hexdigest())
        if self._index == 0:
            absent, elsewhere = self._absent(store, digests, about, comings, verdict)
            different = set() if absent else {store.get(key) for key in digests}
            proposed = _absence(absent, elsewhere) if absent else "equal" if len(different) == 1 else "different"
        else:
            absent, elsewhere = self._absent(store, [verdict], about, comings)
            if absent and not elsewhere and store.check(digests[:1]):  # the first rank names those that have not come
                absent, _ = self._absent(store, [verdict])
            proposed = _absence(absent if elsewhere else self.ranks[:1], elsewhere) if absent else ""
        # The first verdict holds: a rank that stops waiting for the first rank writes it.
        answer = (store.compare_set(verdict, "", proposed) if proposed else store.get(verdict)).decode()
        if answer.startswith("absent"):
            ranks, elsewhere = json.loads(answer[7:])
            waited = f"did not come to compare within {self._timeout}"
            if elsewhere:
                waited = f"do not come, because ranks wait for each other in different places: {elsewhere}"
            raise ConsensusError(
                f"{about()}; ranks {ranks} {waited}; every one of ranks {list(self.ranks)} has to take this step", ranks
            )
        if answer == "equal":
            self._leave(store, place, [*dict.fromkeys([*digests, *comings]), verdict])
            return [message] * len(self.ranks)
        messages = [f"{place} message {index}" for index in range(len(self.ranks))]
        store.set(messages[self._index], message.hex())
        absent, _ = self._absent(store, messages)
        if absent:
            raise ConsensusError(f"{about()}; ranks {absent} left the comparison", absent)
        found = [bytes.fromhex(store.get(key).decode()) for key in messages]
        self._leave(store, place, [*dict.fromkeys([*digests, *comings]), verdict, *messages])
        return found

    def have_all_come(self, moment: str, purpose: str, limit: timedelta = _PATIENCE) -> bool:
        """Whether all ranks have called this with an equal ``moment``, which is used once, and an equal ``purpose`` before
        one of them has waited for ``limit``. The answer is the same on every rank that calls it with this moment.

        Four small requests to the store a rank; no round.
        """
        if len(self.ranks) == 1 or is_alone():
            return True
        store, place = default_store(), f"{self.place} {moment}"
        verdict, come = f"{place} verdict", f"{place} come {purpose}"
        if store.add(come, 1) == len(self.ranks):
            store.compare_set(verdict, "", "all")
        else:
            try:
                store.wait([verdict], limit)
            except RuntimeError:  # store types have no common error class; a lost store raises again here
                store.compare_set(verdict, "", "late")
        have_come = bool(store.get(verdict) == b"all")
        if have_come:
            self._leave(store, place, [verdict, come])
        return have_come

    def _leave(self, store: dist.Store, place: str, keys: Sequence[str]) -> None:
        """Count this rank as done with reading. A counter determines the last rank, which deletes the keys."""
        counter = f"{place} left"
        if store.add(counter, 1) == len(self.ranks):
            for key in (*keys, counter):
                store.delete_key(key)

    def _absent(
        self,
        store: dist.Store,
        keys: Sequence[str],
        about: Callable[[], str] | None = None,
        comings: Sequence[str] | None = None,
        verdict: str | None = None,
    ) -> tuple[list[int], str]:
        """The ranks that have not written their keys in time, or that will not: then also a sentence about where they wait
        for this one. ``about``: after a while, warn of the ranks that have not come, by ``comings``, the keys that ranks
        write when they come. ``verdict``: the key that another rank writes when it knows that some will not come."""
        end = time.monotonic() + self._timeout.total_seconds()
        patience = self._timeout if about is None else min(_PATIENCE, self._timeout)
        notice, is_first = None, True
        try:
            while True:
                try:
                    store.wait(list(keys), min(patience, timedelta(seconds=max(end - time.monotonic(), 0.001))))
                    return [], ""
                except RuntimeError:  # store types have no common error class; a lost store raises again here
                    if time.monotonic() >= end:
                        return [rank for rank, key in zip(self.ranks, keys) if not store.check([key])], ""
                assert about is not None
                look((), about())
                late = {rank: key for rank, key in zip(self.ranks, comings or keys) if not store.check([key])}
                if verdict is not None and store.check([verdict]):
                    return [rank for rank, key in zip(self.ranks, keys) if not store.check([key])], ""
                if not late:  # all have come, and some work
                    continue
                notice = notice or WaitNotice(store, self.ranks[self._index], about(), self.ranks)
                if elsewhere := notice.cross_wait(late):
                    return list(late), elsewhere
                if is_first:
                    self._warn_of_late_ranks(list(late), about)
                is_first = False
        finally:
            if notice is not None:
                notice.withdraw()

    def _warn_of_late_ranks(self, late: Sequence[int], about: Callable[[], str]) -> None:
        """Warn of late ranks; the first rank that has come does it for all."""
        if late and min(set(self.ranks) - set(late)) == self.ranks[self._index]:
            warnings.warn(
                f"{about()}: ranks {late} have not come for {_PATIENCE.seconds} s; the others wait for them until "
                f"{self._timeout} have passed",
                LateRanksWarning,
                stacklevel=2,
            )


def _absence(ranks: Sequence[int], elsewhere: str) -> str:
    return f"absent {json.dumps([list(ranks), elsewhere])}"


def wait_limit() -> timedelta | None:
    """The environment variable ``VESCALE_TIMEOUT`` in seconds: how long a rank waits for others before the job ends with
    a report. None if it is not set.

    Raises ValueError for values that are no positive number.
    """
    text = os.environ.get("VESCALE_TIMEOUT", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise EnvironmentVariableError(
            f"VESCALE_TIMEOUT is {text!r}; set it to a positive number of seconds, or unset it"
        )
    return timedelta(seconds=seconds)
