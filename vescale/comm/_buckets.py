"""Which tensors share a collective: pure functions, so that all ranks and ``explain`` get the same buckets."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from vescale.comm._ring_cost import Link
from vescale.errors import BucketBytesError

__all__ = ["DEFAULT_BUCKET_BYTES", "FIRST_BUCKET_BYTES", "BucketBytes", "bucket_limits", "plan_buckets"]

DEFAULT_BUCKET_BYTES = 25 * 2**20
FIRST_BUCKET_BYTES = 2**20
"""The first bucket is about this large, so that communication starts early in backward."""

BucketBytes = int | Sequence[int] | Literal["auto"]

# An automatic bucket spends at most this share of its time on latency.
_LATENCY_SHARE = 0.1
_DOUBLINGS = 4


def bucket_limits(bucket_bytes: BucketBytes, num_ranks: int, link: Link) -> tuple[int, ...]:
    """The size limits in bytes of the first, second, ... bucket of a kind, see :func:`plan_buckets`; the last one holds
    for all that follow.

    ``bucket_bytes`` is the limit of all buckets but the first, which is small; or the limits themselves; or ``"auto"``:
    each limit is twice the one before, from small buckets that start early to the size at which the link's latency no
    longer matters.

    Raises ValueError for values that are no positive size.
    """
    if bucket_bytes == "auto":
        step = num_ranks * link.latency_seconds * link.bytes_per_second
        largest = max(FIRST_BUCKET_BYTES, int(step / _LATENCY_SHARE))
        return tuple(max(1, largest >> (_DOUBLINGS - i)) for i in range(_DOUBLINGS + 1))
    if isinstance(bucket_bytes, str) or not isinstance(bucket_bytes, int | Sequence):
        raise BucketBytesError(f"bucket_bytes={bucket_bytes!r}; give bytes, a list of bytes, or 'auto'")
    limits = (min(FIRST_BUCKET_BYTES, bucket_bytes), bucket_bytes) if isinstance(bucket_bytes, int) else bucket_bytes
    if not limits or any(int(limit) < 1 for limit in limits):
        raise BucketBytesError(f"bucket_bytes={bucket_bytes!r}; a bucket holds at least one byte")
    return tuple(int(limit) for limit in limits)


def plan_buckets(items: Sequence[tuple[Hashable, int]], limits: Sequence[int]) -> list[tuple[int, ...]]:
    """Group ``(key, bytes)`` items, given in the order in which they become ready, into buckets of equal keys.

    A bucket takes items in order until the next one would exceed its limit. If it is less than half full, it takes that
    one, too, up to the last limit: a small first bucket then holds a large tensor instead of the bias before it. A larger
    item gets a bucket of its own. Returns the items' indices, with buckets in the order in which they are full.
    """
    open_: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    num_buckets: dict[Hashable, int] = {}
    buckets: list[tuple[int, ...]] = []
    for index, (key, num_bytes) in enumerate(items):
        count = num_buckets.get(key, 0)
        limit = limits[min(count, len(limits) - 1)]
        most = limit if 2 * filled.get(key, 0) >= limit else max(limit, limits[-1])
        if open_.get(key) and filled[key] + num_bytes > most:
            buckets.append(tuple(open_.pop(key)))
            num_buckets[key] = count + 1
            filled[key] = 0
        open_.setdefault(key, []).append(index)
        filled[key] = filled.get(key, 0) + num_bytes
    buckets += [tuple(indices) for indices in open_.values() if indices]
    return sorted(buckets, key=lambda indices: indices[-1])
