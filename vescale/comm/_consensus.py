"""Rounds in which ranks compare what they are about to do, through the store: no collective, so no mismatched one."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.compat import default_store, default_timeout, is_alone

__all__ = ["Consensus", "ConsensusError", "LateRanksWarning", "wait_limit"]


class ConsensusError(RuntimeError):
    """Other ranks did not come to a round in time; ``ranks``: which."""

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class LateRanksWarning(UserWarning):
    """Some ranks have come to a round, and wait for others."""


# Ranks that come later than this are named while the others still wait for them.
_PATIENCE = timedelta(seconds=3)


# By default group, then by name: how many of that name this rank has made.
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Consensus:
    """A meeting place of some ranks. Every rank makes them, and holds their rounds, in the same order.

    When all messages are equal, which is the rule, a round costs every rank three small requests to the store; the first
    rank reads a digest of each. Messages themselves are read only when they differ. The last rank to leave a round deletes
    what was written in it; only a round that some rank did not come to stays, so that it learns of that when it comes.

    Args:
        ranks: global ranks, the same on each of them, this one included.
        name: says whose meeting place it is.
        timeout: how long a round waits for other ranks; None: ``VESCALE_TIMEOUT`` seconds where that is set, else as long
            as the default group's collectives. Whom it waits for is said after 3 seconds.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta | None = None) -> None:
        self.ranks = tuple(sorted(ranks))
        self._index = self.ranks.index(dist.get_rank())
        self._timeout = timeout or wait_limit() or default_timeout()
        own = f"{name} {hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}"
        with _LOCK:
            counter = _COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(own, itertools.count())
        self._place = f"vescale {own} {next(counter)}"
        self._rounds = itertools.count()

    def exchange(self, message: bytes, about: Callable[[], str]) -> list[bytes]:
        """Every rank's message, in rank order.

        Raises ConsensusError with ``about()``, what the round was for, when a rank does not come in time.
        """
        if len(self.ranks) == 1 or is_alone():
            return [message] * len(self.ranks)
        store, place = default_store(), f"{self._place} round {next(self._rounds)}"
        verdict = f"{place} verdict"
        digests = [f"{place} digest {index}" for index in range(len(self.ranks))]
        store.set(digests[self._index], hashlib.sha256(message).hexdigest())
        if self._index == 0:
            absent = self._absent(store, digests, about)
            different = set() if absent else {store.get(key) for key in digests}
            proposed = f"absent {absent}" if absent else "equal" if len(different) == 1 else "different"
        else:
            is_late = bool(self._absent(store, [verdict], about, digests))
            if is_late and store.check(digests[:1]):  # the first rank came, and is about to say who did not
                is_late = bool(self._absent(store, [verdict]))
            proposed = f"absent [{self.ranks[0]}]" if is_late else ""
        # The first verdict holds: a rank that gives up on the first one lets it know.
        answer = (store.compare_set(verdict, "", proposed) if proposed else store.get(verdict)).decode()
        if answer.startswith("absent"):
            ranks = json.loads(answer[7:])
            raise ConsensusError(
                f"{about()}; ranks {ranks} did not come to compare within {self._timeout}; every one of ranks "
                f"{list(self.ranks)} has to take this step",
                ranks,
            )
        if answer == "equal":
            self._leave(store, place, [*digests, verdict])
            return [message] * len(self.ranks)
        messages = [f"{place} message {index}" for index in range(len(self.ranks))]
        store.set(messages[self._index], message.hex())
        if absent := self._absent(store, messages):
            raise ConsensusError(f"{about()}; ranks {absent} left the comparison", absent)
        found = [bytes.fromhex(store.get(key).decode()) for key in messages]
        self._leave(store, place, [*digests, verdict, *messages])
        return found

    def _leave(self, store: dist.Store, place: str, keys: Sequence[str]) -> None:
        """This rank has read what it needs. Nobody reads after the last one, which cannot know to be it before: a counter
        tells."""
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
    ) -> list[int]:
        """The ranks, by position of their keys, that have not written in time. ``about``: say after a while who has not come
        by ``comings``, the keys that ranks write when they come."""
        steps = [self._timeout]
        if about is not None and self._timeout > _PATIENCE:
            steps = [_PATIENCE, self._timeout - _PATIENCE]
        for number, step in enumerate(steps, 1):
            try:
                store.wait(list(keys), step)
            except RuntimeError:  # the kinds of stores have no error in common; one that is lost raises again here
                if about is not None and number < len(steps):
                    self._say_who_is_late(store, comings or keys, about)
            else:
                return []
        return [self.ranks[index] for index, key in enumerate(keys) if not store.check([key])]

    def _say_who_is_late(self, store: dist.Store, comings: Sequence[str], about: Callable[[], str]) -> None:
        """The first rank that has come says it, for all."""
        late = [rank for rank, key in zip(self.ranks, comings) if not store.check([key])]
        if late and min(set(self.ranks) - set(late)) == self.ranks[self._index]:
            warnings.warn(
                f"{about()}: ranks {late} have not come for {_PATIENCE.seconds} s; the others wait for them until "
                f"{self._timeout} have passed",
                LateRanksWarning,
                stacklevel=2,
            )


def wait_limit() -> timedelta | None:
    """What the environment variable ``VESCALE_TIMEOUT`` says, in seconds: how long a rank waits for others before the job
    ends with a report. None when it is not set.

    Raises ValueError for anything but a positive number.
    """
    text = os.environ.get("VESCALE_TIMEOUT", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"VESCALE_TIMEOUT is {text!r}; set it to a positive number of seconds, or unset it")
    return timedelta(seconds=seconds)
