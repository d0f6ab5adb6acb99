"""Compares descriptions of all ranks through the store before the first collective, and names the first difference."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.comm._long_waits import look
from vescale.compat import default_store, default_timeout, is_alone
from vescale.errors import Coded, EnvironmentVariableError

# Which ranks wait for each other in different places: a notice in the store for each rank that has waited for a while.


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


# Rounds in which ranks compare what they are about to do, through the store: without collectives, which could mismatch.


class ConsensusError(Coded, RuntimeError):
    """Other ranks did not come to a round in time; ``ranks``: which ones."""

    code = "VS0212"

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class LateRanksWarning(Coded, UserWarning):
    """Some ranks have come to a round and wait for others."""

    code = "VS0212"


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


Description = Mapping[str, Sequence[tuple[str, str]]]
"""What a rank brings: for each section, in the order of importance, (name, text) in an order that matters."""

_NOTHING = "nothing"
_LISTENERS: list[Callable[[Consensus, str, Description], None]] = []


@dataclass(frozen=True)
class Difference:
    """The first entry that differs between ranks.

    Attributes:
        section: of the description.
        name: of the entry in it.
        found: each text, with the global ranks that have it; most ranks first. "nothing" if a rank has no such entry.
    """

    section: str
    name: str
    found: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that differ from the majority, in order; if two halves differ, the half without the first rank."""
        return tuple(sorted(rank for _, ranks in self.found[1:] for rank in ranks))

    def text(self) -> str:
        """``'a.weight' of parameters is (4, 4) on ranks [0, 1, 3] and (4, 5) on rank [2]``."""
        named = f"{self.name!r} of {self.section}" if self.name else self.section
        return f"{named} is " + " and ".join(f"{text} on {_ranks_text(ranks)}" for text, ranks in self.found)


def listen_to_descriptions(listener: Callable[[Consensus, str, Description], None]) -> None:
    """From now on, ``listener`` gets each comparison, what it is about, and this rank's description: of ranks that are
    tried out alone, who compare nothing themselves."""
    _LISTENERS.append(listener)


def compare_descriptions(own: Description, consensus: Consensus, about: Callable[[], str]) -> Difference | None:
    """The first difference between the ranks' descriptions, the same on every rank; None: all are equal.

    One round of ``consensus``, without a collective. Descriptions are transferred only if they differ.

    Raises ConsensusError if a rank does not come in time.
    """
    for listener in _LISTENERS:
        listener(consensus, about(), own)
    message = zlib.compress(json.dumps([[section, list(map(list, own[section]))] for section in own]).encode(), 1)
    messages = consensus.exchange(message, about)
    if all(other == message for other in messages):
        return None
    everyone = {rank: dict(json.loads(zlib.decompress(m))) for rank, m in zip(consensus.ranks, messages)}
    sections = dict.fromkeys(section for sections in everyone.values() for section in sections)
    for section in sections:
        entries = {rank: [tuple(entry) for entry in found.get(section, ())] for rank, found in everyone.items()}
        if len(set(map(tuple, entries.values()))) > 1:
            return first_difference(section, entries)
    return None


def first_difference(section: str, entries: Mapping[int, Sequence[tuple[str, str]]]) -> Difference:
    """Of what each rank has in a section; not all have the same."""
    texts = {rank: dict(found) for rank, found in entries.items()}
    for name in dict.fromkeys(name for found in texts.values() for name in found):
        if len({found.get(name) for found in texts.values()}) > 1:
            return Difference(section, name, _grouped({rank: f.get(name, _NOTHING) for rank, f in texts.items()}))
    # The same entries, in another order (or some of them more often).
    for place in range(max(map(len, entries.values()))):
        names = {rank: found[place][0] if place < len(found) else _NOTHING for rank, found in entries.items()}
        if len(set(names.values())) > 1:
            return Difference(section, f"number {place} in the order", _grouped(names))
    raise AssertionError("descriptions differ and nothing in them does")


def _grouped(texts: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    ranks_of: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks_of.setdefault(text, []).append(rank)
    most_first = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return tuple((text, tuple(ranks)) for text, ranks in most_first)


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
