"""``CollectiveOrder``: which units this rank has gathered and reduced, for the ranks to compare."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vescale.comm import Consensus, all_reduce_, first_difference
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._gather_sizes import GatherSizes
from vescale.gradients._order_mismatch import OrderMismatchError, different_modules
from vescale.gradients._order_watch import COMPARISON, END_OF_BACKWARD, GATHER, REDUCTION, OrderWatch
from vescale.gradients._reducer_turns import RootTurn
from vescale.gradients._replica_errors import ReplicaErrors

__all__ = ["CollectiveOrder", "OrderedUnit", "next_unit_number"]

_DIGEST_BYTES = 8
_SLOT_BYTES = 2 * _DIGEST_BYTES  # a digest and its complement: their maxima over the ranks fit if all are equal
_MOST_KEPT = 1 << 16

Entries = Sequence[tuple[str, str]]


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

    def entries(self, what: str) -> list[tuple[str, int]]:
        """Places in the order, and numbers of units."""
        return [(f"{what} {place}", number) for place, number in enumerate(self.numbers, self._num_earlier + 1)]


class _History:
    """What ranks have in common that communicate along the same axes, whichever models they run.

    Attributes:
        watch: of the ranks along the axis that shards; watch_across: of all data-parallel ranks, where these are more.
        errors: of the ranks along the axis that shards, for the others.
        sizes: of gathers; reduced: units in the order of their reductions; units: by number, as far as they are there.
        message_bytes: the longest message of a model.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        shard_group = axes.mesh.get_group(axes.shard)
        self.sizes, self.reduced = GatherSizes(shard_group), _Log()
        self.errors = ReplicaErrors(axes.data_parallel_ranks, dist.get_process_group_ranks(shard_group))
        self.watch = OrderWatch(shard_group, self._path_of, self.errors.tell)
        self.watch_across = None
        if axes.num_replicas > 1:
            self.watch_across = OrderWatch(axes.data_parallel.group, self._path_of, lambda _: None)
        self.units: weakref.WeakValueDictionary[int, OrderedUnit] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        self.message_bytes = 0

    @property
    def watches(self) -> list[OrderWatch]:
        return [watch for watch in (self.watch, self.watch_across) if watch is not None]

    def _path_of(self, number: int) -> str:
        return self.name_of(number)[0]

    def name_of(self, number: int) -> tuple[str, str]:
        """Its path, and a longer name for where other units have this path, too."""
        unit = self.units.get(number)
        path, model = ("a module", "a model") if unit is None else (unit.path() or "the root", unit.order.model)
        return path, f"{path} of {model} (number {number} of what fully_shard was given)"


# By default group, then by the name of the group along which there are shards, and all data-parallel ranks.
_HISTORIES: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], _History]] = weakref.WeakKeyDictionary()


def _history(axes: DataParallelAxes) -> _History:
    known = _HISTORIES.setdefault(dist.group.WORLD, {})
    shard_group = axes.mesh.get_group(axes.shard)
    key = shard_group.group_name, axes.data_parallel_ranks
    if key not in known:
        known[key] = _History(axes)
    return known[key]


def next_unit_number(axes: DataParallelAxes) -> int:
    """Of units that communicate along ``axes``, of all models, in the order in which they were made: from 1. On a
    rank outside of the mesh: 0."""
    return 0 if axes.mesh.get_coordinate() is None else next(_history(axes).numbers)


class OrderedUnit:
    """A unit among those that communicate along the same axes; ``first_flag``: of its parameters, among its model's."""

    def __init__(self, order: CollectiveOrder, number: int, first_flag: int, path: Callable[[], str]) -> None:
        self.order, self.number, self.first_flag, self.path = order, number, first_flag, path

    def gathers(self) -> None:
        self.order.gathered.add(self.number)

    def begins_gather(self, num_bytes: int) -> None:
        """Before each gather, which has ``num_bytes``; see :class:`OrderWatch`."""
        self.order.history.watch.post(GATHER, num_bytes, self.number)

    def agree_on_size(self, num_bytes: int) -> None:
        """Before each gather of pieces of ``num_bytes``.

        Raises OrderMismatchError on every rank if another one wants to gather another size, or a unit of another model.
        """
        order = self.order
        if order.history.errors.has_raised:
            order.history.errors.go_on()
        if order.shard_group.size() > 1 and not order.history.sizes.agree(order.number, num_bytes, order.device):
            order.raise_gathers()

    def check_gathered(self, gathered: torch.Tensor) -> None:
        """After a gather, before its data are used; raises as :meth:`agree_on_size`."""
        group = self.order.shard_group
        if not gathered.is_cuda and group.size() > 1 and GatherSizes.has_notice(gathered, group.size()):
            self.order.raise_gathers()

    def reduces(self, across_replicas: bool, num_bytes: int) -> None:
        """Before each reduction of the unit, of ``num_bytes``; ``across_replicas``: not only along the axis that shards.

        Raises OrderMismatchError on every rank if another one is about to reduce a unit of another model.
        """
        history = self.order.history
        if history.errors.has_raised:
            history.errors.go_on()
        watches = history.watches if across_replicas else [history.watch]
        try:
            self.order.take_turn(across_replicas)
        except OrderMismatchError:
            for watch in watches:
                watch.begin_anew()
            raise
        for watch in watches:
            watch.post(REDUCTION, num_bytes, self.number)
        history.reduced.add(self.number)


class CollectiveOrder:
    """The units of one model that communicate along ``axes``, and the order in which this rank has gathered and reduced them
    since the ranks last compared it.

    Gathers are compared between the ranks of a shard group, reductions between all data-parallel ranks: replicas may run
    different numbers of forwards. What several models have reduced along the same axes is one order; that their gathers meet
    is found before each (:class:`GatherSizes`), that their reductions do before the first of a backward (:class:`RootTurn`).

    ===================  ==============================================================================================
    moment               comparison
    ===================  ==============================================================================================
    end of a backward    :meth:`message` goes with the collective that tells unused parameters, which has the same size on
    that reduces         all ranks, whatever they have run; :meth:`check` its maximum
    end of a forward     :meth:`compare_gathers`: an all-reduce of 16 bytes over the shard group, if there were gathers
    without gradients
    ===================  ==============================================================================================

    Attributes:
        number: of the first unit, which is that of no other order; model: the name of its class.
    """

    def __init__(self, axes: DataParallelAxes) -> None:
        self._axes = axes
        self._num_flags = self.number = 0
        self.model = ""
        self.gathered = _Log()
        self._turns: tuple[RootTurn, ...] = ()
        self.history = _history(axes)
        self.shard_group, self.device = axes.mesh.get_group(axes.shard), axes.device
        coordinate = axes.mesh.get_coordinate() or [0] * axes.mesh.ndim
        self._replica = 0
        for axis in axes.replicate:
            self._replica = self._replica * axes.mesh.size(axis) + coordinate[axis]

    def enroll(self, number: int, path: Callable[[], str], num_flags: int) -> OrderedUnit:
        """Add a unit with a :func:`next_unit_number` and ``num_flags`` parameters; in the same order on every rank.
        ``path``: its name."""
        unit = OrderedUnit(self, number, self._num_flags, path)
        history = self.history
        history.units[number] = unit
        self._num_flags += num_flags
        self.number = self.number or number
        history.message_bytes = max(history.message_bytes, self.header_bytes + self._num_flags)
        return unit

    def begin(self, model: str) -> None:
        """All data-parallel ranks have found out together that they run ``model``, whose units have been enrolled."""
        self.model = model
        self.history.sizes.begin(self.number)
        self.history.reduced.clear()
        for watch in self.history.watches:
            watch.open()
        if self._axes.num_replicas > 1:
            self.history.errors.open()
        if not self._turns:  # roots may share an order
            ranks = dist.get_process_group_ranks(self.shard_group), self._axes.data_parallel_ranks
            self._turns = tuple(RootTurn(each, model, self.device) for each in ranks)

    def take_turn(self, across_replicas: bool) -> None:
        """See :meth:`OrderedUnit.reduces`."""
        if self._turns:
            self._turns[across_replicas].take()

    def end_turn(self) -> None:
        """A backward has ended."""
        for turn in self._turns:
            turn.end()

    # At the end of a backward

    @property
    def header_bytes(self) -> int:
        """Of a message: what stands before the flags."""
        return _SLOT_BYTES * (1 + self._axes.num_replicas)

    def message(self, flags: Mapping[int, Sequence[int]]) -> bytearray:
        """Bytes of which the ranks take the maximum: a slot for reductions and the model, one for the gathers of each
        replica, and a byte for each parameter of all units. As long as that of any other model along these axes, whose
        message it would meet. ``flags``: those that are not 0, by their first place."""
        found = bytearray(self.history.message_bytes)
        found[:_SLOT_BYTES] = _slot(_digest(self.history.reduced.digest(), [self.number]))
        own = _SLOT_BYTES * (1 + self._replica)
        found[own : own + _SLOT_BYTES] = _slot(self.gathered.digest())
        for first, codes in flags.items():
            place = self.header_bytes + first
            found[place : place + len(codes)] = bytes(codes)
        return found

    def begins_to_check(self) -> None:
        """Before the ranks send their messages; see :class:`OrderWatch`."""
        for watch in self.history.watches:
            watch.post(END_OF_BACKWARD)

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
        self.history.reduced.clear()
        self.history.sizes.begin()

    # At the end of a forward, and before and after a gather

    def compare_gathers(self) -> None:
        """Compare the gathers since the last comparison with the other ranks of the shard group.

        Raises OrderMismatchError on each of them if they differ.
        """
        group = self.shard_group
        if group.size() == 1 or not self.gathered.numbers:
            return
        self.history.watch.post(COMPARISON)
        own = torch.frombuffer(_slot(self.gathered.digest()), dtype=torch.uint8).to(self._axes.device)
        if not _is_one(all_reduce_(own, "max", group, requester="which units were gathered").wait().tolist()):
            self.raise_gathers()
        self.gathered.clear()
        self.history.sizes.begin()

    def raise_gathers(self) -> NoReturn:
        """Called by all ranks of the shard group, whose gathers differ."""
        self._raise(self._replica, self.shard_group)

    def _raise(self, replica: int, group: dist.ProcessGroup) -> NoReturn:
        """``replica``: whose gathers differ; -1: reductions do."""
        consensus = Consensus(dist.get_process_group_ranks(group), f"order of units along {group.group_name}")
        log, what = (self.history.reduced, "reduction") if replica < 0 else (self.gathered, "gather")
        entries = [*log.entries(what), ("the model that runs", self.number)]
        own = [(place, *self.history.name_of(number)) for place, number in entries]
        found: dict[int, list[tuple[str, str, str]]] = {}
        for rank, message in zip(
            consensus.ranks,
            consensus.exchange(json.dumps([self._replica, own]).encode(), lambda: "comparing the order of units"),
        ):
            of, rows = json.loads(message)
            if replica in (-1, of):
                found[rank] = rows
        log_of = _named(found)
        self.gathered.clear()
        self.history.reduced.clear()
        self.history.sizes.begin_after_error()
        for watch in [self.history.watch] if group is self.shard_group else self.history.watches:
            watch.begin_anew()
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may exit after this: let all have read
            consensus.exchange(b"read", lambda: "leaving the comparison of the order of units")
        error = _error(log_of)
        if group is self.shard_group:
            self.history.errors.tell(error)
        raise error


def _error(log_of: Mapping[int, Entries]) -> OrderMismatchError:
    """Of ranks with these logs."""
    if len({tuple(entries) for entries in log_of.values()}) == 1:
        return OrderMismatchError(
            f"ranks {sorted(log_of)} have found each other in different gathers, and have gathered the same since they "
            "compared last: an error has ended a forward or backward of some of them at another place. End the program "
            "on every rank where one rank raises"
        )
    difference = first_difference("units since the last comparison", log_of)
    return different_modules(difference.text(), difference.ranks)


def _named(found: Mapping[int, Sequence[tuple[str, str, str]]]) -> dict[int, Entries]:
    """Each place with the path of its unit, or the longer name where units have one path. Of each rank."""
    longer: dict[str, set[str]] = {}
    for rows in found.values():
        for _, path, name in rows:
            longer.setdefault(path, set()).add(name)
    return {
        rank: [(place, path if len(longer[path]) == 1 else name) for place, path, name in rows]
        for rank, rows in found.items()
    }


def _digest(earlier: bytes, numbers: Sequence[int]) -> bytes:
    return hashlib.blake2b(earlier + array("I", numbers).tobytes(), digest_size=_DIGEST_BYTES).digest()


def _slot(digest: bytes) -> bytearray:
    return bytearray(digest) + bytearray(255 - byte for byte in digest)


def _is_one(maximum: Sequence[int]) -> bool:
    """Whether all ranks have put the same digest in a slot."""
    return all(a + b == 255 for a, b in zip(maximum[:_DIGEST_BYTES], maximum[_DIGEST_BYTES:], strict=True))
