"""``Round``: ranks compare something, or hand in small messages, before they communicate; through the store, and rarely.

What a rank of a round of N ranks asks the store for:

============================================  =========================================================================
ranks that agree                              4 requests; 5 or 6 of the one that comes, or leaves, last
ranks that hand in different messages         6, and 2 more of these; 4 more where messages are long
the first rank gets a message of each         6, and at most 2 more of the one that comes, or leaves, last; the first
(:meth:`Round.lead`)                          rank gets one value with all messages
ranks that wait for more than 3 seconds       3 more, and one every 3 to 10 seconds
============================================  =========================================================================

None of these numbers depends on N: who has come is one value, to which each rank adds a row, and how many have come is
another. The rank that comes last reads the rows and writes the verdict, for which all others wait. The rank that comes first
names those that are late.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.comm import LONG_WAIT_SECONDS, look, tell_wait
from vescale.compat import default_store, default_timeout, is_alone, own_connection
from vescale.errors import ArgumentError, ConsensusError, LateRanksWarning

# The store of the job, as far as ranks agree through it: lists of rows, and a connection for each thread.


PAUSED = "vescale paused"
"""The key with how many ranks are stopped at a breakpoint: time limits do not count meanwhile."""
_NO_VALUE = "?"  # no row, and no value, is this

# By default group: connections to the store that no thread uses at the moment. A new one looks the host's name up, which may
# take seconds.
_UNUSED: weakref.WeakKeyDictionary[Any, list[dist.Store]] = weakref.WeakKeyDictionary()
_CONNECTION_LOCK = threading.Lock()


@contextlib.contextmanager
def connection() -> Iterator[dist.Store]:
    """To the store, for this thread: a thread that waits for a key keeps others from using its connection."""
    if threading.current_thread() is threading.main_thread():
        yield default_store()
        return
    with _CONNECTION_LOCK:
        unused = _UNUSED.setdefault(dist.group.WORLD, [])
        store = unused.pop() if unused else None
    store = own_connection() if store is None else store
    try:
        yield store
    finally:
        unused.append(store)


def add_row(store: Any, key: str, index: int, row: str) -> None:
    """Add a row, which is one line, of the rank at position ``index`` to a list that all ranks add to. One request."""
    if store.has_extended_api():
        store.append(key, f"{index} {row}\n")
    else:  # a file, or a store in Python: of each rank its rows
        own = f"{key} {index}"
        store.set(own, (peek(store, own) or "") + f"{index} {row}\n")


def rows_of(store: Any, key: str, num_ranks: int) -> list[tuple[int, str]] | None:
    """The rows so far, with positions of ranks; of one rank in order. None: there are none, or they have been deleted. One
    request; waits for nothing."""
    if store.has_extended_api():
        text = peek(store, key)
    else:
        found = [peek(store, f"{key} {index}") for index in range(num_ranks)]
        text = "".join(each for each in found if each is not None) or None
    if text is None:
        return None
    return [(int(index), row) for index, _, row in (line.partition(" ") for line in text.split("\n") if line)]


def delete_rows(store: Any, key: str, num_ranks: int) -> None:
    if store.has_extended_api():
        store.delete_key(key)
        return
    for index in range(num_ranks):
        store.delete_key(f"{key} {index}")


def peek(store: dist.Store, key: str) -> str | None:
    """The value of a key, if it has one; waits for nothing."""
    found = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE)).decode()
    return None if found == _NO_VALUE else found


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
        raise ArgumentError(f"VESCALE_TIMEOUT is {text!r}; set it to a positive number of seconds, or unset it")
    return timedelta(seconds=seconds)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 2``, or ``ranks [0, 1, 3]``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


# Posts: what one rank tells all that want to know it, under a key that is used once.


def post(key: str, text: str) -> None:
    """``text`` is not empty, and stays. One request."""
    with connection() as store:
        store.set(f"vescale post {key}", text)


def posted(key: str) -> str | None:
    """None: nobody has posted it. Waits for nothing; one request."""
    with connection() as store:
        return peek(store, f"vescale post {key}")


def post_once(key: str, text: str) -> str:
    """What the first rank has posted. One request."""
    with connection() as store:
        return store.compare_set(f"vescale post {key}", "", text).decode()


def add_post(key: str, text: str) -> None:
    """Beside those of this and other ranks. One request."""
    with connection() as store:
        add_row(store, f"vescale posts {key}", dist.get_rank(), text)


def added_posts(key: str) -> list[str]:
    """Those so far, in order. Waits for nothing; one request."""
    with connection() as store:
        return [text for _, text in rows_of(store, f"vescale posts {key}", dist.get_world_size()) or ()]


def read_post(key: str) -> str:
    """Wait until it is posted, as long as the store waits."""
    with connection() as store:
        return store.get(f"vescale post {key}").decode()


def await_posts(keys: Mapping[str, int]) -> list[str]:
    """The texts of keys, and which rank posts each. One request, and one for each key.

    Raises ConsensusError with the ranks that have not posted within ``VESCALE_TIMEOUT`` seconds, or the default group's
    timeout.
    """
    full = {f"vescale post {key}": rank for key, rank in keys.items()}
    with connection() as store:
        try:
            store.wait(list(full), wait_limit() or default_timeout())
        except RuntimeError:  # store types have no common error class; a lost store raises again here
            late = {rank for key, rank in full.items() if not store.check([key])}
            if late:
                raise ConsensusError(f"ranks {sorted(late)} have not posted", sorted(late)) from None
        return [store.get(key).decode() for key in full]


# After this time, ranks that have not come are named in a warning.
_PATIENCE = timedelta(seconds=3)
_LONGEST_SLICE = 10.0
_NUM_CHECKS = 8  # in a slice but the first
_INLINE_BYTES = 128  # longer messages are sent only where they differ
_NOT_EQUAL = 1 << 32  # is added to the number of ranks where the verdict is more than that all are equal
_MOST_FOLLOWED = 16  # ranks that a look for ranks that wait for each other asks about

# By default group, then by name: how many of that name this rank has made.
_COUNTERS: weakref.WeakKeyDictionary[Any, dict[str, itertools.count[int]]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class Round:
    """Rounds among a fixed set of ranks. Every rank creates its instances, and runs their rounds, in the same order.

    The last rank that leaves a round deletes its keys; the keys of a round to which some rank did not come are kept, so that
    this rank learns of it when it comes.

    Args:
        ranks: global ranks, the same on each of them, including this one.
        name: of the rounds, unique to its caller.
        timeout: of a round; None: ``VESCALE_TIMEOUT`` seconds if that is set, else the timeout of the default group.
        warns: whether after 3 seconds a warning names the ranks that have not come. Else a hang report is told of a wait,
            and names them; where there is one, the round waits twice as long.

    Attributes:
        place: a prefix of keys in the store that nobody else uses, the same on every rank.
    """

    def __init__(
        self, ranks: Sequence[int], name: str, timeout: timedelta | None = None, *, warns: bool = True
    ) -> None:
        self.ranks, self.warns = tuple(sorted(ranks)), warns
        self.index = self.ranks.index(dist.get_rank())
        self.timeout = timeout or wait_limit() or default_timeout()
        own = f"{name} {hashlib.sha256(str(self.ranks).encode()).hexdigest()[:16]}"
        with _LOCK:
            counter = _COUNTERS.setdefault(dist.group.WORLD, {}).setdefault(own, itertools.count())
        self.place = f"vescale {own} {next(counter)}"
        self._numbers = itertools.count()

    def late_text(self, about: str, late: Sequence[int], seconds: int) -> str:
        """What is warned of ranks that have not come for a while."""
        return (
            f"{about}: ranks {list(late)} have not arrived for {seconds} s; the others wait for them until "
            f"{self.timeout} have passed"
        )

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to compare with."""
        return len(self.ranks) == 1 or is_alone()

    def exchange(self, message: bytes | Callable[[], bytes], about: Callable[[], str]) -> list[bytes]:
        """Every rank's message, in rank order.

        ``message``: a function is work that takes its time, and is called once the others can see that this rank has come:
        they are not warned of ranks that work. What it raises is raised here, and ConsensusError, which tells it, on the
        others.

        Raises ConsensusError with ``about()``, the purpose of the round, if a rank does not come in time.
        """
        if self.is_alone:
            return [message if isinstance(message, bytes) else message()] * len(self.ranks)
        with self._meeting(about) as meeting:
            return meeting.exchange(message)

    def lead(self, message: Callable[[], str], first: Callable[[Sequence[str]], str], about: Callable[[], str]) -> str:
        """``first`` runs on the first rank with the messages of all ranks, in their order; every rank gets what it returns.

        Raises what ``message`` or ``first`` raises, on this rank; on the others ConsensusError, and that if a rank does not
        come in time.
        """
        if self.is_alone:
            return first([message()] * len(self.ranks))
        with self._meeting(about) as meeting:
            return meeting.lead(message, first)

    def hand_in(self, message: bytes, is_fine: Callable[[list[bytes]], bool]) -> HandedIn:
        """A round in which nobody waits: the rank that comes last finds out whether the messages of all ranks, which may
        differ, are fine. Three small requests to the store a rank, and one for each time that it asks."""
        with self._meeting(lambda: "") as meeting:
            meeting.hand_in(message, is_fine)
        return HandedIn(self, meeting)

    @contextlib.contextmanager
    def _meeting(self, about: Callable[[], str]) -> Iterator[_Meeting]:
        with connection() as store:
            meeting = _Meeting(self, store, next(self._numbers), about)
            try:
                yield meeting
            except dist.DistError as error:
                if error is meeting.own_failure:
                    raise
                lost = "the process that hosts the job's store (rank 0 or the launcher) has ended; see its own error"
                raise ConsensusError(f"{about()}; {lost}", [0], "", f"it is gone: {lost}") from error

    @contextlib.contextmanager
    def together(self, about: Callable[[], str]) -> Iterator[None]:
        """What the block raises on one rank is raised there, and as ConsensusError on the others, behind the block. One
        round, for all ranks that enter it."""
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error

        def message() -> bytes:
            if failure is not None:
                raise failure
            return b""

        self.exchange(message, about)

    def have_all_come(self, moment: str, purpose: str, limit: timedelta = _PATIENCE) -> bool:
        """Whether all ranks have called this with an equal ``moment``, which is used once, and an equal ``purpose`` before
        one of them has waited for ``limit``. The answer is the same on every rank that calls it with this moment.

        Four small requests to the store a rank, two more of the last; no round.
        """
        if self.is_alone:
            return True
        place = f"{self.place} {moment}"
        verdict, come = f"{place} verdict", f"{place} come {purpose}"
        with connection() as store:
            if store.add(come, 1) == len(self.ranks):
                store.compare_set(verdict, "", "all")
            else:
                try:
                    store.wait([verdict], limit)
                except RuntimeError:  # store types have no common error class; a lost store raises again here
                    store.compare_set(verdict, "", "late")
            have_come = bool(store.get(verdict) == b"all")
            if have_come and store.add(come, 1) == 2 * len(self.ranks):
                for key in (verdict, come):
                    store.delete_key(key)
            return have_come


class HandedIn:
    """What :meth:`Round.hand_in` has begun."""

    def __init__(self, round_: Round, meeting: _Meeting) -> None:
        self._round, self._meeting = round_, meeting

    def messages(self) -> list[bytes] | None:
        """Of all ranks, if they are not fine; none, if they are. None: not all ranks have come, or it has been told before.
        Waits for nothing."""
        with connection() as store:
            return self._meeting.handed_in(store)


# What a row says: by which thread the rank has come, then nothing while it works, or its message.
_MAIN, _OTHER = "m", "t"
_INLINE, _DIGEST, _HAS_COME = "=", "#", "+"


class _Meeting:
    """One round.

    ``roll``: a row of each rank that has come. ``count``: how many have come, then also how many have left, and
    ``_NOT_EQUAL`` if ranks have to read ``verdict``. The first verdict that is written holds.
    """

    def __init__(self, round_: Round, store: dist.Store, number: int, about: Callable[[], str]) -> None:
        self._ranks, self._index, self._limit = round_.ranks, round_.index, round_.timeout
        self._store, self._about, self._late_text = store, about, round_.late_text
        self._warns, self._number = round_.warns, number + 1
        self._place = f"{round_.place} round {number}"
        self._roll, self._count, self._verdict = (f"{self._place} {key}" for key in ("roll", "count", "verdict"))
        is_main = threading.current_thread() is threading.main_thread()
        self._thread = _MAIN if is_main else _OTHER
        self._is_led = False
        self.own_failure: BaseException | None = None  # of this rank's message, or of what it makes of all

    def exchange(self, message: bytes | Callable[[], bytes]) -> list[bytes]:
        if not isinstance(message, bytes):
            self._enter("")
            with self._told_to_others():
                message = message()
        is_inline = len(message) <= _INLINE_BYTES
        text = base64.b64encode(message).decode() if is_inline else hashlib.sha256(message).hexdigest()
        self._enter((_INLINE if is_inline else _DIGEST) + text)
        come, all_ranks = self._store.add(self._count, 1), len(self._ranks)
        is_last = come == all_ranks
        verdict = self._conclude() if is_last else ""
        if verdict == "equal":
            return [message] * all_ranks
        if not is_last:
            self._wait(self._verdict, is_first=come == 1)
            left = self._store.add(self._count, 1)
            if left < _NOT_EQUAL:
                if left == 2 * all_ranks - 1:
                    self._delete(self._count, self._verdict)
                return [message] * all_ranks
            verdict = self._store.get(self._verdict).decode()
            if verdict == "equal":  # another rank has stopped waiting just then
                return [message] * all_ranks
        groups: list[tuple[str, list[int]]] = json.loads(self._checked(verdict).removeprefix("different "))
        messages = self._messages(groups, message)
        # All come and leave, and all but the last one have learned that messages differ.
        if self._store.add(self._count, 1) % _NOT_EQUAL == 3 * all_ranks - 1:
            self._delete(self._count, self._verdict)
            if any(text.startswith(_DIGEST) for text, _ in groups):
                self._delete(f"{self._place} sent", f"{self._place} all sent")
                delete_rows(self._store, f"{self._place} messages", all_ranks)
        return messages

    def lead(self, message: Callable[[], str], first: Callable[[Sequence[str]], str]) -> str:
        self._is_led = True
        self._enter(_HAS_COME)
        with self._told_to_others():
            own = message()
        heap, full, all_ranks = f"{self._place} messages", f"{self._place} full", len(self._ranks)
        if self._index:
            add_row(self._store, heap, self._index, json.dumps(own))
        come = self._store.add(self._count, 1)
        if come == all_ranks and self._index:
            self._store.set(full, "1")
        if self._index:
            self._wait(self._verdict, is_first=come == 1)
            verdict = self._store.get(self._verdict).decode()
        else:
            if come != all_ranks:
                self._wait(full, is_first=come == 1)
            verdict = peek(self._store, self._verdict) or ""  # another rank has failed, or stopped waiting
            if not verdict:
                with self._told_to_others():
                    found = dict(rows_of(self._store, heap, all_ranks) or ())
                    texts = [own, *(json.loads(found[index]) for index in range(1, all_ranks))]
                    verdict = "is " + first(texts)
                verdict = self._store.compare_set(self._verdict, "", verdict).decode()
            if verdict.startswith("is "):
                self._delete(full)
                for key in (heap, self._roll):
                    delete_rows(self._store, key, all_ranks)
        answer = self._checked(verdict)
        if self._store.add(self._count, 1) == 2 * all_ranks:
            self._delete(self._count, self._verdict)
        return answer.removeprefix("is ")

    def hand_in(self, message: bytes, is_fine: Callable[[list[bytes]], bool]) -> None:
        add_row(self._store, self._roll, self._index, base64.b64encode(message).decode())
        if self._store.add(self._count, 1) == len(self._ranks):
            self._store.set(self._verdict, "fine" if is_fine(self._handed_in(self._store)) else "different")

    def handed_in(self, store: dist.Store) -> list[bytes] | None:
        verdict = peek(store, self._verdict)
        if verdict is None:
            return None
        found = [] if verdict == "fine" else self._handed_in(store)
        if store.add(self._count, 1) == 2 * len(self._ranks):
            for key in (self._count, self._verdict):
                store.delete_key(key)
            delete_rows(store, self._roll, len(self._ranks))
        return found

    def _handed_in(self, store: dist.Store) -> list[bytes]:
        rows = rows_of(store, self._roll, len(self._ranks)) or ()
        return [base64.b64decode(row) for _, row in sorted(rows)]

    def _enter(self, row: str) -> None:
        add_row(self._store, self._roll, self._index, self._thread + row)

    @contextlib.contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """What the block raises, the others are told."""
        try:
            yield
        except BaseException as error:
            self.own_failure = error
            with contextlib.suppress(RuntimeError):  # the store is gone
                text = f"{type(error).__name__}: {error}"
                self._propose(self._place, "failed", [self._ranks[self._index]], text)
            raise

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    # The verdict

    def _conclude(self) -> str:
        """Of the last rank: the verdict, if no other rank has written one."""
        rows = dict(rows_of(self._store, self._roll, len(self._ranks)) or ())
        groups: dict[str, list[int]] = {}
        for index in range(len(self._ranks)):
            groups.setdefault(rows[index][1:], []).append(index)
        if len(groups) == 1:
            proposed = "equal"
        else:
            proposed = f"different {json.dumps(list(groups.items()))}"
            self._store.add(self._count, _NOT_EQUAL)
        found = self._store.compare_set(self._verdict, "", proposed).decode()
        if found == proposed:
            delete_rows(self._store, self._roll, len(self._ranks))
        return found

    def _propose(self, place: str, kind: str, ranks: Sequence[int], text: str) -> None:
        self._store.add(f"{place} count", _NOT_EQUAL)
        self._store.compare_set(f"{place} verdict", "", f"{kind} {json.dumps([list(ranks), text])}")
        self._store.set(f"{place} full", "1")  # whoever waits for this reads the verdict

    def _checked(self, verdict: str) -> str:
        kind, _, content = verdict.partition(" ")
        if kind not in ("absent", "failed"):
            return verdict
        ranks, text = json.loads(content)
        if kind == "failed":
            raise ConsensusError(f"{self._about()}; rank {ranks[0]} has failed: {text}", ranks, "", text)
        waited = f"did not arrive at the comparison within {self._limit}"
        if text:
            waited = f"will not arrive, because ranks wait for each other in different places: {text}"
        raise ConsensusError(
            f"{self._about()}; ranks {ranks} {waited}; each of ranks {list(self._ranks)} must take this step",
            ranks,
            text,
        )

    def _messages(self, groups: Sequence[tuple[str, list[int]]], own: bytes) -> list[bytes]:
        """Of all ranks, where some differ: the first rank that has a long one sends it."""
        long = {members[0]: members for text, members in groups if text.startswith(_DIGEST)}
        found: dict[int, bytes] = {}
        for text, members in groups:
            if text.startswith(_INLINE):
                found.update(dict.fromkeys(members, base64.b64decode(text[1:])))
        if long:
            heap, count, full = (f"{self._place} {key}" for key in ("messages", "sent", "all sent"))
            if self._index in long:
                add_row(self._store, heap, self._index, base64.b64encode(own).decode())
                if self._store.add(count, 1) == len(long):
                    self._store.set(full, "1")
            try:
                self._store.wait([full], self._limit)
            except RuntimeError:  # store types have no common error class; a lost store raises again here
                sent = {index for index, _ in rows_of(self._store, heap, len(self._ranks)) or ()}
                absent = [self._ranks[index] for index in long if index not in sent]
                raise ConsensusError(f"{self._about()}; ranks {absent} left the comparison", absent) from None
            for index, text in rows_of(self._store, heap, len(self._ranks)) or ():
                found.update(dict.fromkeys(long[index], base64.b64decode(text)))
        return [found[index] for index in range(len(self._ranks))]

    # Waits

    def _wait(self, key: str, *, is_first: bool) -> None:
        """Until the key is there, or the verdict, which this rank writes after the time limit; that begins anew when ranks
        are stopped at a breakpoint."""
        begin = time.monotonic()
        end, has_warned, is_noted, told = begin + self._limit.total_seconds(), False, False, None
        length = _PATIENCE.total_seconds() if self._warns else LONG_WAIT_SECONDS
        is_there = self._comes
        try:
            while not is_there(key, max(min(length, end - time.monotonic()), 0.001)):
                is_there = self._is_there
                if time.monotonic() >= end and self._store.add(PAUSED, 0):
                    end = time.monotonic() + self._limit.total_seconds()
                if time.monotonic() >= end:
                    late, _ = self._late()
                    if late is not None:
                        self._propose(self._place, "absent", late, "")
                    return
                awaited = () if self._warns else self._late(are_working_late=False)[0]
                look(awaited or (), self._about())
                if told is None and not self._warns:
                    told = tell_wait(self._about(), self._number, f"steps of {self._ranks}", self._ranks)
                    end += self._limit.total_seconds() if told is not None else 0.0
                if self._thread == _MAIN and not is_noted:
                    is_noted = True
                    notice = [self._place, self._about(), self._ranks]
                    self._store.set(_notice(self._ranks[self._index]), json.dumps(notice))
                if is_first:
                    late, here = self._late(are_working_late=False)
                    if late and not self._are_crossed(late, here) and self._warns and not has_warned:
                        has_warned = True
                        text = self._late_text(self._about(), late, _PATIENCE.seconds)
                        warnings.warn(text, LateRanksWarning, stacklevel=2)
                else:
                    length = min(1.5 * length, _LONGEST_SLICE)
        finally:
            if told is not None:
                told.ended = time.time()
            if is_noted:  # the key stays: a rank that is about to read it would wait for it
                self._store.set(_notice(self._ranks[self._index]), "")

    def _comes(self, key: str, seconds: float) -> bool:
        """Whether the key is there before a time is over. One request; the store prints two lines if it is not."""
        since = time.monotonic()
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError:  # store types have no common error class
            if time.monotonic() - since < 0.9 * seconds:  # the store is lost
                raise
            return False
        return True

    def _is_there(self, key: str, seconds: float) -> bool:
        """The same with several requests, of which nothing is printed: for those who have waited for long."""
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() >= end:
                return False
            time.sleep(seconds / _NUM_CHECKS)
        return True

    def _late(self, *, are_working_late: bool = True) -> tuple[list[int] | None, list[int]]:
        """Ranks that have not come, or that work, and ranks that wait here on their main threads. None: there is a
        verdict."""
        rows = rows_of(self._store, self._roll, len(self._ranks))
        if rows is None:
            return None, []
        latest = dict(rows)
        if self._is_led and are_working_late:
            handed_in = dict(rows_of(self._store, f"{self._place} messages", len(self._ranks)) or ())
            others = [rank for index, rank in enumerate(self._ranks) if index and index not in handed_in]
            return others or [self._ranks[0]], []
        late = [
            rank
            for index, rank in enumerate(self._ranks)
            if index not in latest or (are_working_late and len(latest[index]) == 1)
        ]
        if are_working_late and not late:
            late = [self._ranks[rows[-1][0]]]  # it was to write the verdict
        return late, [self._ranks[index] for index, row in latest.items() if row.startswith(_MAIN)]

    def _are_crossed(self, late: Sequence[int], here: Sequence[int]) -> bool:
        """Whether a late rank waits in another round for a rank that waits in this one, directly or for others that do:
        neither can go on, because a thread waits in one place at a time. Writes the verdicts of these rounds.

        What is read at different times holds at once: as long as a rank waits here, nobody of the chain can go on.
        """
        if not here:
            return False
        visited = {self._place}
        queue: list[tuple[int, tuple[tuple[int, str, str, list[int], list[int]], ...]]]
        queue = [(rank, ()) for rank in late[:_MOST_FOLLOWED]]
        for rank, chain in queue:
            notice = peek(self._store, _notice(rank))
            if not notice:
                continue
            place, about, ranks = json.loads(notice)
            rows = rows_of(self._store, f"{place} roll", len(ranks))
            if place in visited or rows is None or self._store.check([f"{place} verdict"]):
                continue
            visited.add(place)
            absent = sorted(set(ranks) - {ranks[index] for index, _ in rows})
            longer = (*chain, (rank, place, about, ranks, absent))
            ends = [each for each in absent if each in here]
            if not ends:
                queue += [(each, longer) for each in absent[: max(_MOST_FOLLOWED - len(queue), 0)]]
                continue
            if set(late) - set(self._late(are_working_late=False)[0] or ()) or self._store.check([self._verdict]):
                return False  # some have come in the meantime
            places = [(ends[0], self._about(), list(self._ranks))]
            places += [(other, what, members) for other, _, what, members, _ in longer]
            text = "; ".join(
                f"rank {other} is at {what!r} with ranks {members}" for other, what, members in sorted(places)
            )
            for _, other_place, _, _, awaited in longer:
                self._propose(other_place, "absent", awaited, text)
            self._propose(self._place, "absent", late, text)
            return True
        return False


def _notice(rank: int) -> str:
    """The key of where a rank has waited for a while, on its main thread."""
    return f"vescale waits {rank}"


# Descriptions that ranks compare before the first collective, and the first difference between them.


Description = Mapping[str, Sequence[tuple[str, str]]]
"""What a rank brings: for each section, in the order of importance, (name, text) in an order that matters."""

_NOTHING = "nothing"
_LISTENERS: list[Callable[[Round, str, Description], None]] = []


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
        return f"{named} is " + " and ".join(f"{text} on {ranks_text(ranks)}" for text, ranks in self.found)


def listen_to_descriptions(listener: Callable[[Round, str, Description], None]) -> None:
    """From now on, ``listener`` gets each comparison, what it is about, and this rank's description: of ranks that are
    tried out alone, who compare nothing themselves."""
    _LISTENERS.append(listener)


def compare_descriptions(own: Description, round_: Round, about: Callable[[], str]) -> Difference | None:
    """The first difference between the ranks' descriptions, the same on every rank; None: all are equal.

    One round, without a collective. Descriptions are transferred only if they differ.

    Raises ConsensusError if a rank does not come in time.
    """
    for listener in _LISTENERS:
        listener(round_, about(), own)
    message = zlib.compress(json.dumps([[section, list(map(list, own[section]))] for section in own]).encode(), 1)
    messages = round_.exchange(message, about)
    if all(other == message for other in messages):
        return None
    everyone = {rank: dict(json.loads(zlib.decompress(m))) for rank, m in zip(round_.ranks, messages)}
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
