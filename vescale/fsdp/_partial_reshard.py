"""``KeptPieces``: what a rank keeps of gathered parameters when it reshards to fewer ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.buffer import PendingBuffer
from vescale.comm import all_gather_into, group_of_ranks
from vescale.fsdp._bucket import Bucket
from vescale.fsdp._extended_bucket import ExtendedBucket

__all__ = ["KeptPieces"]


class KeptPieces:
    """Between forward and backward every rank holds ``1 / num_ranks`` of the gathered buffer, in ``param_dtype``.

    ``num_ranks`` consecutive ranks of the shard axis hold all of it together, and backward gathers from them alone: from
    the ranks of one machine, when ``num_ranks`` is the number of its devices. Memory is never cut inside a block, for the
    finer cut over all ranks already respects blocks. Of an :class:`ExtendedBucket` nothing is kept: it is gathered anew.
    """

    def __init__(self, buckets: Sequence[Bucket], pieces: list[torch.Tensor | None], group: dist.ProcessGroup) -> None:
        self._buckets = buckets
        self._pieces = pieces
        self._group = group
        self.copied: Any = None
        """An event after the copies, which the gather waits for; None on the CPU."""

    @classmethod
    def keep(cls, buckets: Sequence[Bucket], num_ranks: int) -> KeptPieces:
        """Copy this rank's pieces out of the gathered buffers. Makes a process group of ``num_ranks`` on first use."""
        group = _neighbours(buckets[0], num_ranks)
        index = group.rank()
        pieces: list[torch.Tensor | None] = []
        with torch.no_grad():
            for bucket in buckets:
                if isinstance(bucket, ExtendedBucket):
                    pieces.append(None)
                    continue
                size = bucket.whole.numel // num_ranks
                pieces.append(bucket.whole.local[index * size : (index + 1) * size].clone())
        return cls(buckets, pieces, group)

    def gather(self, asker: str, custom: Any = None) -> list[PendingBuffer]:
        return [
            PendingBuffer(bucket.whole, all_gather_into(bucket.whole.local, piece, self._group, asker=asker))
            if piece is not None
            else bucket.gather(asker, custom)
            for bucket, piece in zip(self._buckets, self._pieces, strict=True)
        ]


def _neighbours(bucket: Bucket, num_ranks: int) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(bucket.axes.mesh.get_group(bucket.axes.shard))
    first = ranks.index(dist.get_rank()) // num_ranks * num_ranks
    return group_of_ranks(tuple(ranks[first : first + num_ranks]))
