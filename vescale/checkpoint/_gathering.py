"""One exchange between the ranks of a job that does not keep their training back: through the store, on a thread."""

from __future__ import annotations

import itertools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.checkpoint._error_text import as_text, from_text
from vescale.checkpoint._replicas import has_other_ranks
from vescale.comm import wait_limit
from vescale.compat import default_timeout, own_connection
from vescale.errors import CheckpointError, SaveFailedError

__all__ = ["Gathering", "first_rank_decides", "raise_together"]

# By default group: how many this rank has made.
_COUNTERS: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Gathering:
    """Rounds in which the first rank gets a message of each, does something, and tells all how it went.

    Made by all ranks in the same order, on the thread that has their process group; rounds may run on another thread.
    """

    def __init__(self) -> None:
        self._alone = not has_other_ranks()
        self.rank, self.world = (0, 1) if self._alone else (dist.get_rank(), dist.get_world_size())
        if not self._alone:
            self._store = own_connection()
            self._timeout: timedelta = wait_limit() or default_timeout()
            with _LOCK:
                counter = _COUNTERS.setdefault(dist.group.WORLD, itertools.count())
            self._name = f"vescale checkpoint {next(counter)}"
            self._rounds = itertools.count()

    def round(self, message: str, first: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
        """``first`` runs on the first rank with all messages, in rank order; every rank gets what it returns.

        Raises CheckpointError where it failed, or ranks do not come; on every rank that does.
        """
        if self._alone:
            return _answer(lambda: first([message]))
        place = f"{self._name} {next(self._rounds)}"
        keys = [f"{place} {rank}" for rank in range(self.world)]
        outcome = f"{place} outcome"
        if self.rank == 0:
            answer = self._lead(keys, message, first)
            self._store.set(outcome, json.dumps(answer))
        else:
            self._store.set(keys[self.rank], message)
            try:
                self._store.wait([outcome], self._timeout)
            except RuntimeError as error:  # store types have no common error class
                raise SaveFailedError(f"rank 0 did not answer within {self._timeout}: it is gone, or hangs") from error
            answer = json.loads(self._store.get(outcome))
        self._leave([*keys[1:], outcome], f"{place} left")
        if "error" in answer:
            raise from_text(answer["error"])
        return dict(answer)

    def _lead(
        self, keys: Sequence[str], message: str, first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            self._store.wait(list(keys[1:]), self._timeout)
        except RuntimeError:
            gone = [rank for rank, key in enumerate(keys) if rank and not self._store.check([key])]
            return {
                "error": as_text(
                    SaveFailedError(f"ranks {gone} did not come within {self._timeout}: they are gone, or hang")
                )
            }
        messages = [message, *(self._store.get(key).decode() for key in keys[1:])]
        try:
            return first(messages)
        except (CheckpointError, OSError, ValueError) as error:
            return {"error": as_text(error)}

    def _leave(self, keys: Sequence[str], counter: str) -> None:
        """The last rank that leaves deletes the keys."""
        if self._store.add(counter, 1) == self.world:
            for key in (*keys, counter):
                self._store.delete_key(key)


def _answer(first: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return first()
    except (OSError, ValueError) as error:
        raise from_text(as_text(error)) from error


def first_rank_decides(decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first rank's ``decide()`` returns, on every rank; called by all of them."""
    return Gathering().round("", lambda _: decide())


def raise_together(error: CheckpointError | None) -> None:
    """Raise the first rank's error on every rank, if any has one; called by all of them."""

    def look(messages: Sequence[str]) -> dict[str, Any]:
        failed = [rank for rank, message in enumerate(messages) if message]
        if failed and len(messages) > 1:
            raise from_text(messages[failed[0]], f"rank {failed[0]}: ")
        return {}

    try:
        Gathering().round(as_text(error) if error is not None else "", look)
    except CheckpointError as together:
        raise together from error
    if error is not None:
        raise error
