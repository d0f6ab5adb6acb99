"""Posts: what one rank tells all that want to know it, under a key that is used once."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from vescale.agreement._store import add_row, connection, peek, rows_of, wait_limit
from vescale.compat import default_timeout
from vescale.errors import ConsensusError


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
