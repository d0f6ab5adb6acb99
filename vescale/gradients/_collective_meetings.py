"""``CollectiveMeetings``: before ranks communicate for units, they learn that some are about to do something else."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch.distributed as dist

from vescale.comm import Board, Consensus, CrossWaitError, RankGoneError, wait_limit
from vescale.compat import default_timeout, is_alone
from vescale.gradients._data_parallel_axes import DataParallelAxes

__all__ = ["CollectiveMeetings", "LateRanksError"]


class LateRanksError(RuntimeError):
    """``ranks`` have not come, and will not; the text says why."""

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class CollectiveMeetings:
    """Of the ranks along ``axes``, before each gather, reduction and comparison of their units, on one host with gloo: in
    shared memory, where it takes microseconds (:class:`vescale.comm.Board`). Elsewhere ranks do not meet, nor do those of
    replicas, which may run different numbers of forwards.

    Units of equal size are compared later, by digests. But where ranks gather or reduce different *numbers* of units, a
    gather of some would meet a reduction, or the end of the backward, of others: they would wait for each other, or get
    messages of sizes that they do not expect, which ends the process.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self._axes = axes
        self._board: Board | None = None
        self._is_open = False
        self._number = 0

    def open(self) -> None:
        """All data-parallel ranks call it together."""
        if self._is_open:
            return
        self._is_open = True
        ranks = self._axes.data_parallel_ranks
        if len(ranks) > 1 and not self._axes.replicate and not is_alone() and dist.get_backend() == "gloo":
            self._board = Board.open(ranks, Consensus(ranks, "collectives of units").place)

    def are_together(self, what: str) -> bool:
        """Whether all ranks are about to do the same; the answer is the same on all of them.

        Raises LateRanksError if some do not come.
        """
        board = self._board
        if board is None:
            return True
        self._number += 1
        if board.post(self._number, (zlib.crc32(what.encode()), 0, 0), what):
            return True
        limit = (wait_limit() or default_timeout()).total_seconds()
        try:
            rows = board.wait(self._number, limit, what)
        except (TimeoutError, RankGoneError, CrossWaitError) as error:
            absent = [board.ranks[position] for position in board.absent(self._number)]
            raise LateRanksError(str(error) or f"not within {limit:g} s", absent) from None
        return len({row[0] for row in rows}) == 1
