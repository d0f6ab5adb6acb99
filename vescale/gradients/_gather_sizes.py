"""``GatherSizes``: before data are used, ranks learn that they were about to gather units of different sizes, or models."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any

import numpy
import torch
import torch.distributed as dist

from vescale.comm import Consensus, all_gather_into

__all__ = ["GatherSizes"]

_FEW_RANKS = 64  # numpy, which a step uses nowhere else, takes longer for as many: its code is in no cache
_MARK = 0x7FF9_A57C_7FFB_3E61  # not a number in float64, and in each half as float32 and bfloat16
_NOTICE = struct.Struct("<QQ")
_MOST_GUARDED = 10_000
_MOST_KEPT = 1 << 16


class GatherSizes:
    """The number of bytes of each gather, and the model whose units are gathered, as the ranks of a shard group have agreed
    on them.

    What a rank expects follows from the gathers before, since the ranks last compared their order: that which came next the
    last time, else one like the gather before. All ranks expect the same, because they agree on each change:

    1. A rank that wants to gather pieces of another size, or of another model, waits in the store for all others to want the
       same.
    2. If they do not come within 3 s, it tells them in a gather of pieces of the expected size, in which its piece is a
       notice. If all ranks have sent the same one, the gather follows. Otherwise ranks that sent one raise, and so
       do ranks that find one where they expected parameters (on a CPU; a device would have to be waited for).

    So steps that are like earlier ones communicate nothing more, a first one asks the store where sizes change, and no rank
    sends a message of a size that its receiver does not expect, which a backend answers with the end of the process (gloo),
    or not at all (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last = self._last_compared = (0, 0)
        self._consensus = Consensus(dist.get_process_group_ranks(group), f"gathers along {group.group_name}")
        self._next: dict[int, tuple[int, int]] = {}
        self._history = self._num_since = 0
        self._place: tuple[object, int] = ("", 0)

    def begin(self, place: object = None) -> None:
        """The ranks have compared their order. ``place``: where they did, the same on all of them, and at no other time;
        None: after an iteration."""
        self._last_compared = self._last
        self._history = hash(self._last[0])  # models may take turns
        self._num_since = 0
        self._place = (self._place[0], self._place[1] + 1) if place is None else (place, 0)

    def begin_after_error(self) -> None:
        """The ranks have found out that they differ: some have gathered what others have not."""
        self._next.clear()
        self._last = self._last_compared
        self.begin()

    def agree(self, model: int, num_bytes: int, device: torch.device) -> bool:
        """Called before each gather of pieces of ``num_bytes`` of a unit of ``model``; False: some rank wants to gather
        another size, or another model's unit."""
        self._num_since += 1
        if self._num_since > _MOST_GUARDED:  # forwards whose backward never comes
            return True
        wanted = model, num_bytes
        expected = self._next.get(self._history, self._last)
        if expected != wanted and expected[1] >= _NOTICE.size:
            moment = f"comparison {self._place} gather {self._num_since}"
            together = self._consensus.have_all_come(moment, str(wanted))
            if not together and not _is_agreed(expected[1], wanted, self._group, device):
                return False
        if len(self._next) >= _MOST_KEPT:  # every iteration gathers other sizes; all ranks clear at the same gather
            self._next.clear()
        self._next[self._history] = wanted
        self._history, self._last = hash((self._history, wanted)), wanted
        return True

    @staticmethod
    def has_notice(gathered: torch.Tensor, num_ranks: int) -> bool:
        """Whether a rank has sent a notice in place of its piece. ``gathered`` is in the memory of the host."""
        stride, place = gathered.nbytes // num_ranks, gathered.data_ptr()
        if stride < _NOTICE.size:
            return False
        if num_ranks <= _FEW_RANKS:
            return any(ctypes.c_uint64.from_address(place + rank * stride).value == _MARK for rank in range(num_ranks))
        memory: Any = (ctypes.c_char * gathered.nbytes).from_address(place)
        heads = numpy.ndarray((num_ranks,), numpy.uint64, memory, strides=(stride,))
        return bool((heads == _MARK).any())


def _is_agreed(expected: int, wanted: tuple[int, int], group: dist.ProcessGroup, device: torch.device) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        notice = _NOTICE.pack(_MARK, zlib.crc32(repr(wanted).encode()))
        piece = torch.zeros(expected, dtype=torch.uint8)
        piece[: _NOTICE.size] = torch.frombuffer(bytearray(notice), dtype=torch.uint8)
        out = torch.empty(expected * group.size(), dtype=torch.uint8, device=device)
        found = all_gather_into(out, piece.to(device), group, requester="agreement on the size of a gather").wait()
        heads = found.view(group.size(), expected)[:, : _NOTICE.size].cpu().contiguous()
    return all(bytes(head.tolist()) == notice for head in heads)
