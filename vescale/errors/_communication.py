"""Errors of groups, buckets and comparisons between ranks."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "BucketBytesError",
    "NotInMeshError",
]


class BucketBytesError(Coded, ValueError):
    """`bucket_bytes` is no size of a bucket."""

    code = "VS1303"


class NotInMeshError(Coded, ValueError):
    """A rank asked for its group on a mesh that it is not part of."""

    code = "VS1304"
