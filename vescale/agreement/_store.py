"""The store of the job, as far as ranks agree through it: lists of rows, and a connection for each thread."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from vescale.compat import default_store, default_timeout, own_connection
from vescale.errors import ArgumentError, ConsensusError

PAUSED = "vescale paused"
"""The key with how many ranks are stopped at a breakpoint: time limits do not count meanwhile."""
_NOTHING = "?"  # no row, and no value, is this

# By default group: connections to the store that no thread uses at the moment. A new one looks the host's name up, which may
# take seconds.
_UNUSED: weakref.WeakKeyDictionary[Any, list[dist.Store]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


@contextlib.contextmanager
def connection() -> Iterator[dist.Store]:
    """To the store, for this thread: a thread that waits for a key keeps others from using its connection."""
    if threading.current_thread() is threading.main_thread():
        yield default_store()
        return
    with _LOCK:
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
    found = bytes(store.compare_set(key, _NOTHING, _NOTHING)).decode()
    return None if found == _NOTHING else found


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
