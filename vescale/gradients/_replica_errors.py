"""``ReplicaErrors``: what the ranks of one shard group have raised is raised by their replicas, too, which wait for them."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from vescale.comm import Consensus, look_while_waiting, shared_memory
from vescale.compat import default_store, is_alone
from vescale.gradients._order_mismatch import OrderMismatchError
from vescale.gradients._order_watch import end_soon

__all__ = ["ReplicaErrors"]

# A row: how many errors the rank has raised, or 0 if it has gone on since; the first rank of its shard group; the length of
# the latest error; the error. The number is written last, so that a row with one is
# complete.
_HEAD, _NUMBER, _CONTENT = struct.Struct("3Q"), struct.Struct("Q"), struct.Struct("2Q")
_ROW_BYTES = 4096
# How long a rank waits for replicas that have raised, but whose processes go on: their scripts may begin another step.
_SECONDS_TO_GO_ON = 10.0


class ReplicaErrors:
    """Of all data-parallel ranks, on one host; elsewhere it does nothing.

    Ranks of one shard group find by themselves that they have gathered different units. They raise, and never come where
    their replicas wait for them: before a backward, or in a reduction. So they write the error into memory that all ranks
    map, and a rank that waits raises it, too, if their processes have ended, or if they have not gone on for 10 s. They may
    go on with another step, if no replica has given up by then: a key of the store tells, which the first one writes.

    Args:
        ranks: all of them; shard_ranks: those of this rank's shard group.

    Attributes:
        has_raised: whether this rank has told of an error, and has not gone on since.
    """

    def __init__(self, ranks: Sequence[int], shard_ranks: Sequence[int]) -> None:
        self._ranks, self._group = tuple(ranks), min(shard_ranks)
        self._base = self._ranks.index(dist.get_rank()) * _ROW_BYTES
        self._memory: memoryview | None = None
        self._place = ""
        self._num_told = 0
        self.has_raised = False
        self._seen: dict[tuple[int, int], float] = {}
        self._raised: set[tuple[int, int]] = set()

    def open(self) -> None:
        """All ranks call it together."""
        if self._place or is_alone():
            return
        self._place = Consensus(self._ranks, "errors of replicas").place
        memory = shared_memory(self._ranks, self._place, len(self._ranks) * _ROW_BYTES)
        if memory is not None:
            self._memory = memoryview(memory)
            look_while_waiting(self)

    def tell(self, error: OrderMismatchError) -> None:
        """Before all ranks of the shard group raise it."""
        if self._memory is None:
            return
        self._num_told, self.has_raised = self._num_told + 1, True
        content = f"{json.dumps(error.ranks)}\n{error.args[0]}".encode()[: _ROW_BYTES - _HEAD.size]
        begin = self._base + _HEAD.size
        self._memory[begin : begin + len(content)] = content
        _CONTENT.pack_into(self._memory, self._base + _NUMBER.size, self._group, len(content))
        _NUMBER.pack_into(self._memory, self._base, self._num_told)

    def go_on(self) -> None:
        """Before this rank communicates again after an error.

        Raises OrderMismatchError if a replica has given up.
        """
        self.has_raised = False
        if self._memory is not None and self._decide(self._group, self._num_told, "goes on") != "goes on":
            raise self._error(self._memory, self._base)
        if self._memory is not None:
            _NUMBER.pack_into(self._memory, self._base, 0)

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        """See :class:`vescale.comm.Look`; raises OrderMismatchError: for each error of a group once, or when its process has
        ended."""
        if self._memory is None:
            return
        for place, rank in enumerate(self._ranks):
            number, group, _ = _HEAD.unpack_from(self._memory, place * _ROW_BYTES)
            if not number or group == self._group or (awaited and rank not in awaited):
                continue
            if (group, number) in self._raised and not in_vain:  # the script has caught it
                continue
            since = self._seen.setdefault((rank, number), time.monotonic())
            is_late = in_vain or time.monotonic() - since >= _SECONDS_TO_GO_ON
            if is_late and self._decide(group, number, "given up") == "given up":
                if not in_vain:
                    end_soon()
                self._raised.add((group, number))
                raise self._error(self._memory, place * _ROW_BYTES)

    def _decide(self, group: int, number: int, proposed: str) -> str:
        """What the first rank has proposed about this error of the group."""
        with suppress(RuntimeError):  # the rank that holds the store has ended, so that its group does not go on
            return default_store().compare_set(f"{self._place} {group} {number}", "", proposed).decode()
        return proposed

    @staticmethod
    def _error(memory: memoryview, base: int) -> OrderMismatchError:
        length = _HEAD.unpack_from(memory, base)[2]
        ranks, _, text = bytes(memory[base + _HEAD.size :][:length]).decode(errors="replace").partition("\n")
        return OrderMismatchError(text, json.loads(ranks))
