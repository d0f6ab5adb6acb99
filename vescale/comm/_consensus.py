"""Rounds in which ranks compare what they are about to do, through the store: no collective, so no mismatched one."""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.compat import default_store, default_timeout, is_alone

__all__ = ["Consensus", "ConsensusError"]


class ConsensusError(RuntimeError):
    """Other ranks did not come to a round in time."""


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
        timeout: how long a round waits for other ranks; None: as long as the default group's collectives.
    """

    def __init__(self, ranks: Sequence[int], name: str, timeout: timedelta | None = None) -> None:
        self.ranks = tuple(sorted(ranks))
        self._index = self.ranks.index(dist.get_rank())
        self._timeout = timeout or default_timeout()
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
            absent = self._absent(store, digests)
            different = set() if absent else {store.get(key) for key in digests}
            proposed = f"absent {absent}" if absent else "equal" if len(different) == 1 else "different"
        else:
            is_late = bool(self._absent(store, [verdict]))
            if is_late and store.check(digests[:1]):  # the first rank came, and is about to say who did not
                is_late = bool(self._absent(store, [verdict]))
            proposed = f"absent [{self.ranks[0]}]" if is_late else ""
        # The first verdict holds: a rank that gives up on the first one lets it know.
        answer = (store.compare_set(verdict, "", proposed) if proposed else store.get(verdict)).decode()
        if answer.startswith("absent"):
            raise ConsensusError(f"{about()}; ranks {answer[7:]} did not come to compare within {self._timeout}")
        if answer == "equal":
            self._leave(store, place, [*digests, verdict])
            return [message] * len(self.ranks)
        messages = [f"{place} message {index}" for index in range(len(self.ranks))]
        store.set(messages[self._index], message.hex())
        if absent := self._absent(store, messages):
            raise ConsensusError(f"{about()}; ranks {absent} left the comparison")
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

    def _absent(self, store: dist.Store, keys: Sequence[str]) -> list[int]:
        """The ranks, by position of their keys, that have not written in time."""
        try:
            store.wait(list(keys), self._timeout)
        except RuntimeError:  # the kinds of stores have no error in common; one that is lost raises again here
            return [self.ranks[index] for index, key in enumerate(keys) if not store.check([key])]
        return []
