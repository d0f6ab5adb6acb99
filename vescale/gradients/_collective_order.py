"""``CollectiveOrder``: which units this rank has gathered and reduced, for the ranks to compare."""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from vescale.comm import Consensus, Difference, all_reduce_, first_difference
from vescale.errors import Coded
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._gather_sizes import GatherSizes

__all__ = ["CollectiveOrder", "OrderMismatchError", "OrderedUnit"]

_DIGEST_BYTES = 8
_SLOT_BYTES = 2 * _DIGEST_BYTES  # a digest and its complement: their maxima over the ranks fit if all are equal
_MOST_KEPT = 1 << 16

Entries = Sequence[tuple[str, str]]


class OrderMismatchError(Coded, RuntimeError):
    """Ranks have gathered, or reduced, different units in one place of their order, so that the contents were mixed.

    ``ranks``: those that differ from the majority.
    """

    code = "VS0701"

    def __init__(self, problem: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class _Log:
    """Numbers of units in the order of their collectives. What is older than the last 65,536 is kept as a digest."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self._earlier, self._num_earlier = b"", 0

    def add(self, number: int) -> None:
        self.numbers.append(number)
        if len(self.numbers) >= 2 * _MOST_KEPT:
            older = self.numbers[:_MOST_KEPT]
            self._earlier, self._num_earlier = _digest(self._earlier, older), self._num_earlier + len(older)
            del self.numbers[:_MOST_KEPT]

    def digest(self) -> bytes:
        return _digest(self._earlier, self.numbers)

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]

    def entries(self, what: str, name_of: Callable[[int], str]) -> Entries:
        return [(f"{what} {place}", name_of(n)) for place, n in enumerate(self.numbers, self._num_earlier + 1)]


class OrderedUnit:
    """A unit among those that communicate along the same axes; ``first_flag``: of its parameters among all."""

    def __init__(self, order: CollectiveOrder, number: int, first_flag: int, path: Callable[[], str]) -> None:
        self.order, self.number, self.first_flag, self.path = order, number, first_flag, path

    def gathers(self) -> None:
        self.order.gathered.add(self.number)

    def agree_on_size(self, num_bytes: int) -> None:
        """Before each gather of pieces of ``num_bytes``.

        Raises OrderMismatchError on every rank if another one wants to gather another size.
        """
        order = self.order
        if order.shard_group.size() > 1 and not order.sizes.agree(num_bytes, order.device):
            order.raise_gathers()

    def check_gathered(self, gathered: torch.Tensor) -> None:
        """After a gather, before its data are used; raises as :meth:`agree_on_size`."""
        group = self.order.shard_group
        if not gathered.is_cuda and group.size() > 1 and self.order.sizes.has_notice(gathered, group.size()):
            self.order.raise_gathers()

    def reduces(self) -> None:
        self.order.reduced.add(self.number)


class CollectiveOrder:
    """The units that communicate along ``axes``, and the order in which this rank has gathered and reduced them since the
    ranks last compared it.

    Gathers are compared between the ranks of a shard group, reductions between all data-parallel ranks: replicas may run
    different numbers of forwards.

    ===================  ==============================================================================================
    moment               comparison
    ===================  ==============================================================================================
    end of a backward    :meth:`message` goes with the collective that tells unused parameters, which has the same size on
    that reduces         all ranks, whatever they have run; :meth:`check` its maximum
    end of a forward     :meth:`compare_gathers`: an all-reduce of 16 bytes over the shard group, if there were gathers
    without gradients
    ===================  ==============================================================================================
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self._axes = axes
        self._units: list[OrderedUnit] = []
        self._num_flags = 0
        self.gathered, self.reduced = _Log(), _Log()
        self.shard_group, self.device = axes.mesh.get_group(axes.shard), axes.device
        self.sizes = GatherSizes(self.shard_group)
        coordinate = axes.mesh.get_coordinate() or [0] * axes.mesh.ndim
        self._replica = 0
        for axis in axes.replicate:
            self._replica = self._replica * axes.mesh.size(axis) + coordinate[axis]

    def enroll(self, path: Callable[[], str], num_flags: int) -> OrderedUnit:
        """Add a unit with ``num_flags`` parameters; in the same order on every rank. ``path``: its name."""
        unit = OrderedUnit(self, len(self._units), self._num_flags, path)
        self._units.append(unit)
        self._num_flags += num_flags
        return unit

    # At the end of a backward

    @property
    def header_bytes(self) -> int:
        """Of a message: what stands before the flags."""
        return _SLOT_BYTES * (1 + self._axes.num_replicas)

    def message(self, flags: Mapping[int, Sequence[int]]) -> bytearray:
        """Bytes of which the ranks take the maximum: a slot for reductions, one for the gathers of each replica, and a byte
        for each parameter of all units. ``flags``: those that are not 0, by their first place."""
        found = bytearray(self.header_bytes + self._num_flags)
        found[:_SLOT_BYTES] = _slot(self.reduced.digest())
        own = _SLOT_BYTES * (1 + self._replica)
        found[own : own + _SLOT_BYTES] = _slot(self.gathered.digest())
        for first, codes in flags.items():
            place = self.header_bytes + first
            found[place : place + len(codes)] = bytes(codes)
        return found

    def check(self, maximum: Sequence[int]) -> None:
        """Begin anew if the ranks have gathered and reduced the same.

        Raises OrderMismatchError on every rank otherwise, which names units and ranks.
        """
        count = self.header_bytes // _SLOT_BYTES
        slots = [maximum[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES] for slot in range(count)]
        different = [number for number, slot in enumerate(slots) if any(slot) and not _is_one(slot)]
        if different:
            self._raise(max(different) - 1, self._axes.data_parallel.group)
        self._begin()

    def _begin(self) -> None:
        self.gathered.clear()
        self.reduced.clear()
        self.sizes.begin()

    # At the end of a forward, and before and after a gather

    def compare_gathers(self) -> None:
        """Compare the gathers since the last comparison with the other ranks of the shard group.

        Raises OrderMismatchError on each of them if they differ.
        """
        group = self.shard_group
        if group.size() == 1 or not self.gathered.numbers:
            return
        own = torch.frombuffer(_slot(self.gathered.digest()), dtype=torch.uint8).to(self._axes.device)
        if not _is_one(all_reduce_(own, "max", group, requester="which units were gathered").wait().tolist()):
            self.raise_gathers()
        self.gathered.clear()
        self.sizes.begin()

    def raise_gathers(self) -> NoReturn:
        """Called by all ranks of the shard group, whose gathers differ."""
        self._raise(self._replica, self.shard_group)

    def _raise(self, replica: int, group: dist.ProcessGroup) -> NoReturn:
        """``replica``: whose gathers differ; -1: reductions do."""
        consensus = Consensus(dist.get_process_group_ranks(group), f"order of units along {group.group_name}")
        log, what = (self.reduced, "reduction") if replica < 0 else (self.gathered, "gather")
        own = log.entries(what, lambda number: self._units[number].path() or "the root")
        log_of = {}
        for rank, message in zip(
            consensus.ranks,
            consensus.exchange(json.dumps([self._replica, own]).encode(), lambda: "comparing the order of units"),
        ):
            of, entries = json.loads(message)
            if replica in (-1, of):
                log_of[rank] = [(name, unit) for name, unit in entries]
        self._begin()
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may exit after this: let all have read
            consensus.exchange(b"read", lambda: "leaving the comparison of the order of units")
        raise _mismatch(first_difference("units since the last comparison", log_of))


def _mismatch(found: Difference) -> OrderMismatchError:
    return OrderMismatchError(
        f"ranks have run different modules that fully_shard (or a plan's unit) was given: {found.text()}; a gather is a "
        "collective, and gathers of different modules mix their parameters. Run the same modules in the same order on every "
        "rank: give fully_shard the block that holds the experts, or run every expert on every rank, also with no token",
        found.ranks,
    )


def _digest(earlier: bytes, numbers: Sequence[int]) -> bytes:
    return hashlib.blake2b(earlier + array("I", numbers).tobytes(), digest_size=_DIGEST_BYTES).digest()


def _slot(digest: bytes) -> bytearray:
    return bytearray(digest) + bytearray(255 - byte for byte in digest)


def _is_one(maximum: Sequence[int]) -> bool:
    """Whether all ranks have put the same digest in a slot."""
    return all(a + b == 255 for a, b in zip(maximum[:_DIGEST_BYTES], maximum[_DIGEST_BYTES:], strict=True))
