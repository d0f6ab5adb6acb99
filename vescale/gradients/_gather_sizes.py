"""``GatherSizes``: before data are used, ranks learn that they were about to gather units of different sizes."""

from __future__ import annotations

import ctypes
import struct

import torch
import torch.distributed as dist

from vescale.comm import Consensus, all_gather_into

__all__ = ["GatherSizes"]

_MARK = 0x7FF9_A57C_7FFB_3E61  # not a number in float64, and in each half as float32 and bfloat16
_NOTICE = struct.Struct("<QQ")
_MOST_GUARDED = 10_000


class GatherSizes:
    """The number of bytes of each gather, as the ranks of a shard group have agreed on it.

    What a rank expects follows from the sizes of the gathers before, since the ranks last compared their order: that which
    came next the last time, else that of the gather before. All ranks expect the same, because they agree on each change:

    1. A rank that wants to gather pieces of another size waits in the store for all others to want the same.
    2. If they do not come within 3 s, it tells them in a gather of pieces of the expected size, in which its piece is a
       notice. If all ranks have sent one with the same size, the gather follows. Otherwise ranks that sent one raise, and so
       do ranks that find one where they expected parameters (on a CPU; a device would have to be waited for).

    So steps that are like earlier ones communicate nothing more, a first one asks the store where sizes change, and no rank
    sends a message of a size that its receiver does not expect, which a backend answers with the end of the process (gloo),
    or not at all (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._last = group, 0
        self._consensus = Consensus(dist.get_process_group_ranks(group), f"gathers along {group.group_name}")
        self._next: dict[int, int] = {}
        self._history = self._num_since = self._num_comparisons = 0

    def begin(self) -> None:
        """The ranks have compared their order."""
        self._history = self._num_since = 0
        self._num_comparisons += 1

    def agree(self, num_bytes: int, device: torch.device) -> bool:
        """Called before each gather of pieces of ``num_bytes``; False: some rank wants to gather another size."""
        self._num_since += 1
        if self._num_since > _MOST_GUARDED:  # forwards whose backward never comes
            return True
        expected = self._next.get(self._history, self._last)
        if expected != num_bytes and expected >= _NOTICE.size:
            moment = f"comparison {self._num_comparisons} gather {self._num_since}"
            together = self._consensus.have_all_come(moment, str(num_bytes))
            if not together and not _is_agreed(expected, num_bytes, self._group, device):
                return False
        if self._next.get(self._history) != num_bytes:
            self._next[self._history] = num_bytes
        self._history, self._last = hash((self._history, num_bytes)), num_bytes
        return True

    @staticmethod
    def has_notice(gathered: torch.Tensor, num_ranks: int) -> bool:
        """Whether a rank has sent a notice in place of its piece. ``gathered`` is in the memory of the host."""
        stride, place = gathered.nbytes // num_ranks, gathered.data_ptr()
        if stride < _NOTICE.size:
            return False
        return any(ctypes.c_uint64.from_address(place + rank * stride).value == _MARK for rank in range(num_ranks))


def _is_agreed(expected: int, wanted: int, group: dist.ProcessGroup, device: torch.device) -> bool:
    with torch.inference_mode(False), torch.no_grad():
        piece = torch.zeros(expected, dtype=torch.uint8)
        piece[: _NOTICE.size] = torch.frombuffer(bytearray(_NOTICE.pack(_MARK, wanted)), dtype=torch.uint8)
        out = torch.empty(expected * group.size(), dtype=torch.uint8, device=device)
        found = all_gather_into(out, piece.to(device), group, requester="agreement on the size of a gather").wait()
        heads = found.view(group.size(), expected)[:, : _NOTICE.size].cpu().contiguous()
    return all(_NOTICE.unpack(bytes(head.tolist())) == (_MARK, wanted) for head in heads)
