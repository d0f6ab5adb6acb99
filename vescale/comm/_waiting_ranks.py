"""Which ranks wait for each other in different places: a notice in the store for each rank that has waited for a while."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence

import torch.distributed as dist

__all__ = ["WaitNotice"]


class WaitNotice:
    """What a rank publishes when it has waited for a while: where it waits, and for which keys of which ranks.

    If two ranks each wait for a key that the other has not written, in different rounds, neither can go on: a thread waits
    in one place at a time. Only waits of the main thread are compared, because another thread may still write the key.

    Args:
        store: of the job.
        rank: the global rank that waits.
        about: what it is about to do, for messages.
        ranks: which ranks take part in the round.
    """

    def __init__(self, store: dist.Store, rank: int, about: str, ranks: Sequence[int]) -> None:
        self._store, self._rank, self._about, self._ranks = store, rank, about, list(ranks)
        self._is_posted = False

    def cross_wait(self, missing: Mapping[int, str]) -> str:
        """Post the notice, and find a rank that waits for this one elsewhere; a sentence about both, or "".

        Args:
            missing: the key that each late rank has not written.
        """
        if threading.current_thread() is not threading.main_thread():
            return ""
        notice = {"about": self._about, "ranks": self._ranks, "missing": {str(r): key for r, key in missing.items()}}
        self._store.set(_key(self._rank), json.dumps(notice))
        self._is_posted = True
        for other, key in missing.items():
            if self._store.check([_crossed(key)]):  # the other has found it, and left
                return self._store.get(_crossed(key)).decode()
            posted = self._store.get(_key(other)) if self._store.check([_key(other)]) else b""
            if not posted:
                continue
            found = json.loads(posted)
            mine = found["missing"].get(str(self._rank))
            if mine is not None and not self._store.check([mine]) and not self._store.check([key]):
                first, second = sorted(
                    [(self._rank, self._about, self._ranks), (other, found["about"], found["ranks"])]
                )
                sentence = "; ".join(
                    f"rank {rank} is at {about!r} with ranks {ranks}" for rank, about, ranks in (first, second)
                )
                self._store.set(_crossed(mine), sentence)
                return sentence
        return ""

    def withdraw(self) -> None:
        """The key stays, for a rank that is about to read it would wait for it."""
        if self._is_posted:
            self._store.set(_key(self._rank), "")


def _crossed(key: str) -> str:
    return f"{key} will not be written"


def _key(rank: int) -> str:
    return f"vescale waits {rank}"
