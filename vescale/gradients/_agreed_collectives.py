"""``AgreedCollectives``: before a rank begins a collective, the others know its kind, size and model."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any

import numpy
import torch
import torch.distributed as dist

from vescale.agreement import Round, Watch
from vescale.comm import all_gather_into
from vescale.errors import ConsensusError, OrderMismatchError
from vescale.gradients._order_mismatch import GATHER

_FEW_RANKS = 64  # numpy, which a step uses nowhere else, takes longer for as many: its code is in no cache
_MARK = 0x7FF9_A57C_7FFB_3E61  # not a number in float64, and in each half as float32 and bfloat16
_NOTICE = struct.Struct("<QQ")
_MOST_GUARDED = 10_000
_MOST_KEPT = 1 << 16
_NOTHING = (-1, 0, 0)

Collective = tuple[int, int, int]
"""Its kind, the model whose units it is for, and the bytes of a message."""


class AgreedCollectives:
    """What the ranks of a group begin next, as they have agreed on it.

    What a rank expects follows from the collectives before, since the ranks last compared their order: that which came next
    the last time, else what has followed such a one before, else one like it. All ranks expect the same, because they agree
    on each change:

    1. A rank that wants to gather where a gather of other pieces, or of another model, is expected waits in the store for
       all others to want the same. If they do not come within 3 s, it tells them in a gather of pieces of the expected size,
       in which its piece is a notice. If all ranks have sent the same one, the collective follows. Otherwise ranks that sent
       one raise, and so do ranks that find one where they expected parameters (on a CPU; a device would have to be waited
       for).
    2. Where another collective is expected, and in the first one of a model, it hands in what it wants, and waits. If ranks
       are in the expected one, :class:`vescale.agreement.Watch` finds it, and all raise; their processes end.

    So steps that are like earlier ones communicate nothing more, a first one asks the store where collectives change, and no
    rank sends a message of a size that its receiver does not expect, which a backend answers with the end of the process
    (gloo), or not at all (NCCL).
    """

    def __init__(self, group: dist.ProcessGroup, watch: Watch) -> None:
        self._group, self.watch = group, watch
        self._last = self._last_compared = _NOTHING
        self._consensus = Round(watch.ranks, f"collectives along {group.group_name}")
        self._next: dict[int, Collective] = {}
        self._after: dict[Collective, Collective] = {}
        self._history = self._num_since = 0
        self._place: tuple[object, int] = ("", 0)

    def begin_model(self, place: object) -> None:
        """The ranks have found out together that they run another model. ``place``: the same on all of them, and at no other
        time. What ranks have done before, maybe not all the same, counts no more."""
        self._last = self._last_compared = _NOTHING
        self._place, self._history, self._num_since = (place, 0), hash(place), 0
        self.watch.open()

    def begin(self) -> None:
        """The ranks have compared their order, after an iteration."""
        self._last_compared = self._last
        self._history, self._num_since = hash(self._last[1]), 0  # models may take turns
        self._place = self._place[0], self._place[1] + 1

    def begin_after_error(self) -> None:
        """The ranks have found out that they differ: some have begun what others have not."""
        self._next.clear()
        self._after.clear()
        self._last = self._last_compared
        self.begin()
        self.watch.begin_anew()

    def agree(self, wanted: Collective, unit: int, device: torch.device) -> bool:
        """Called before each collective, for a ``unit``; False: some rank wants to begin another one.

        Raises OrderMismatchError if not all ranks come.
        """
        self.watch.begin(wanted[0], wanted[2], unit)
        self._num_since += 1
        if self._num_since > _MOST_GUARDED:  # forwards whose backward never comes
            return True
        expected = self._next.get(self._history) or self._after.get(self._last, self._last)
        if expected != wanted and not self._is_wanted_by_all(expected, wanted, device):
            return False
        if len(self._next) >= _MOST_KEPT:  # every iteration has others; all ranks clear at the same one
            self._next.clear()
            self._after.clear()
        self._next[self._history] = wanted
        if self._last != _NOTHING:
            self._after[self._last] = wanted
        self._history, self._last = hash((self._history, wanted)), wanted
        return True

    def _is_wanted_by_all(self, expected: Collective, wanted: Collective, device: torch.device) -> bool:
        text = str(wanted)
        if expected[0] == GATHER and expected[2] >= _NOTICE.size:
            moment = f"comparison {self._place} collective {self._num_since}"
            return self._consensus.have_all_come(moment, text) or self._is_in_notices(expected[2], text, device)
        try:
            found = self._consensus.exchange(text.encode(), lambda: "agreement on the next collective")
        except ConsensusError as error:
            raise OrderMismatchError(
                f"{error}: run the same modules in the same order on every rank", error.ranks
            ) from None
        return len(set(found)) == 1

    def _is_in_notices(self, num_bytes: int, text: str, device: torch.device) -> bool:
        with torch.inference_mode(False), torch.no_grad():
            group, notice = self._group, _NOTICE.pack(_MARK, zlib.crc32(text.encode()))
            piece = torch.zeros(num_bytes, dtype=torch.uint8)
            piece[: _NOTICE.size] = torch.frombuffer(bytearray(notice), dtype=torch.uint8)
            out = torch.empty(num_bytes * group.size(), dtype=torch.uint8, device=device)
            found = all_gather_into(out, piece.to(device), group, requester="agreement on the next collective").wait()
            heads = found.view(group.size(), num_bytes)[:, : _NOTICE.size].cpu().contiguous()
        return all(bytes(head.tolist()) == notice for head in heads)


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
