"""``ReducerTurn``, ``RootTurn``: several reducers, or roots of ``fully_shard``, of the same ranks reduce in one order on all
ranks, one after the other."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vescale.agreement import FIRST_MESSAGES, Round, first_difference
from vescale.comm import all_reduce_, group_of_ranks, waits_for
from vescale.compat import is_alone
from vescale.errors import ConsensusError, OrderMismatchError
from vescale.gradients._one_backward import OneBackward


class ReducerTurn:
    """The part of one reducer among those of the same ranks.

    Buckets of one reducer are launched in one order on every rank. Those of two would meet each other if ranks reduced in
    different orders: a sum of different parameters. While there is one reducer, or where backwards are compared before they
    run (:attr:`is_compared`), nothing is compared here. With several,

    - ranks compare who reduces, before the first bucket of each backward: on CPUs by an all-reduce of 16 bytes, and through
      the store where the host would have to wait for a device;
    - of several in one backward, the one that was reached first reduces while backward goes on, the others at its end.

    Args:
        ranks: whose collectives must match.
        name: of what is reduced.
        device: on which the ranks communicate.

    Attributes:
        is_compared: whether ranks have compared whose backward runs before it does; then they do not ask again.
    """

    def __init__(self, ranks: Sequence[int], name: Callable[[], str], device: torch.device) -> None:
        self._among = _among(ranks, "call reducer.finish() on ranks without one")
        self._among.num_made += 1
        self.number, self.device = self._among.num_made, device
        self._name = name
        self._is_taken = False
        self._current: Callable[[], object | None] = lambda: None
        self._give_up: Callable[[], None] = lambda: None
        self._is_removed = False
        self.one_backward = OneBackward(device.type)
        self.is_compared: Callable[[], bool] = lambda: False
        self._reference = weakref.ref(self)
        self._among.add()

    @property
    def name(self) -> str:
        return f"{self._name()} (reducer {self.number} of these ranks)"

    def enter(self) -> None:
        """Called inside of a backward whose gradients are reduced, or will be with later ones. Raises
        GradientError while another thread runs one."""
        if len(self._among.ranks) > 1:
            self.one_backward.enter(lambda: self.name)

    def begin(self, current: Callable[[], object | None], give_up: Callable[[], None]) -> None:
        """The gradients of a backward have begun to arrive. ``current`` returns None when it has ended; ``give_up`` forgets
        them."""
        self._current, self._give_up = current, give_up
        if self._reference not in self._among.references:
            self._among.references.append(self._reference)

    @property
    def may_launch(self) -> bool:
        """Whether buckets may be launched before the end of backward."""
        if self._is_taken or self._among.references == [self._reference]:
            return True
        return self._among.running[:1] in ([], [self])

    def take(self) -> None:
        """Before the first bucket of a backward is launched.

        Raises OrderMismatchError on every rank if another one is about to reduce for another reducer; gradients of this
        backward are dropped then.
        """
        if self._is_taken:
            return
        try:
            if not self.is_compared():
                self._among.meet(self)
        except OrderMismatchError:
            for turn in self._among.open:
                if turn is self or turn._current() is not None:
                    turn._give_up()
            raise
        self._is_taken = True

    def end(self) -> None:
        """All buckets have been reduced, or none will be."""
        self._is_taken = False
        if self._among.references == [self._reference]:
            self._among.references = []
        else:
            self._among.references = [turn._reference for turn in self._among.open if turn is not self]

    def remove(self) -> None:
        """The reducer does nothing any more, on every rank."""
        self.end()
        if not self._is_removed:
            self._is_removed = True
            self._among.num_there -= 1


class RootTurn:
    """The part of one root of ``fully_shard`` among those that reduce along the same ranks.

    Gathers tell by themselves which root they belong to. Gradients of a root that stays gathered would meet those of
    another one. So roots compare, through the store, in their first three backwards. Later the heartbeat of the step tells
    it. Made by all ranks together.
    """

    def __init__(self, ranks: Sequence[int], name: str, device: torch.device) -> None:
        self._among = _among(ranks, "run a backward of zero through the root on ranks without one", "root")
        self._among.num_made += 1
        self.number, self.name, self.device = self._among.num_made, f"{name} (root {self._among.num_made})", device
        self._is_taken = False
        self._among.add()

    def take(self) -> None:
        """Before the first reduction of a backward.

        Raises OrderMismatchError on every rank if another one is about to reduce gradients of another root.
        """
        if not self._is_taken:
            self._among.meet(self)
            self._is_taken = True

    def end(self) -> None:
        """The backward has ended."""
        self._is_taken = False


_MOST_ROOTS = 8  # whose first backwards count: those that are gone are not known to be on every rank


class _Among:
    """The reducers, or roots, of the same ranks.

    Args:
        remedy: what a rank does that has no backward.
        what: ``reducer`` or ``root``.

    Attributes:
        num_made: so far; num_there: of these, that have not been removed. The same on every rank, unlike what is freed.
        references: to turns whose gradients arrive, in the order in which they have begun.
    """

    def __init__(self, ranks: Sequence[int], remedy: str, what: str) -> None:
        self.ranks, self._remedy, self._what = tuple(sorted(ranks)), remedy, what
        self.num_made = self.num_there = 0
        self.references: list[weakref.ref[ReducerTurn]] = []
        self._num_meetings = 0
        self._consensus: Round | None = None

    @property
    def open(self) -> list[ReducerTurn]:
        return [turn for reference in self.references if (turn := reference()) is not None]

    @property
    def running(self) -> list[ReducerTurn]:
        """Of these, the ones whose backward has neither ended nor broken off."""
        return [turn for turn in self.open if turn._current() is not None]

    def add(self) -> None:
        """Another reducer is there. Called by all ranks together, which begin anew to compare."""
        self.num_there += 1
        self._num_meetings = 0
        if self.num_there < 2 or len(self.ranks) == 1 or is_alone():
            return
        self._consensus = Round(self.ranks, f"order of {self._what}s")

    def meet(self, turn: ReducerTurn | RootTurn) -> None:
        if self.num_there < 2 or self._consensus is None:
            return
        self._num_meetings += 1
        if isinstance(turn, RootTurn):
            if self._num_meetings <= FIRST_MESSAGES * min(self.num_there, _MOST_ROOTS) and not self._is_alike_in_store(
                turn
            ):
                self._raise(turn)
            return
        if turn.device.type != "cpu":  # which would have to be waited for
            is_alike = self._is_alike_in_store(turn)
        else:
            own = torch.tensor([turn.number, -turn.number])
            group = group_of_ranks(self.ranks)
            others = [rank for rank in self.ranks if rank != dist.get_rank()]
            with waits_for(others, f"the reduction of {turn.name}"):
                high, low = all_reduce_(own, "max", group, requester=f"which {self._what} reduces").wait().tolist()
            is_alike = high == -low
        if not is_alike:
            self._raise(turn)

    def _is_alike_in_store(self, turn: ReducerTurn | RootTurn) -> bool:
        assert self._consensus is not None
        asked = f"comparison of what is reduced ({turn.name})"
        try:
            return len(set(self._consensus.exchange(str(turn.number).encode(), lambda: asked))) == 1
        except ConsensusError as error:
            raise OrderMismatchError(
                f"rank {dist.get_rank()} is before the reduction of {turn.name}, but ranks {list(error.ranks)} have not "
                f"arrived: {error}. Run the same backwards in the same order on every rank, or {self._remedy}",
                error.ranks,
            ) from None

    def _raise(self, turn: ReducerTurn | RootTurn) -> NoReturn:
        consensus = self._consensus
        assert consensus is not None
        messages = consensus.exchange(json.dumps(turn.name).encode(), lambda: f"comparing the order of {self._what}s")
        names = {rank: [("", json.loads(message))] for rank, message in zip(consensus.ranks, messages)}
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may exit after this: let all have read
            consensus.exchange(b"read", lambda: f"leaving the comparison of the order of {self._what}s")
        found = first_difference("what is reduced now", names)
        raise OrderMismatchError(
            f"ranks reduce gradients of different models: {found.text()}; the sums would mix parameters. Run the same "
            f"backwards in the same order on every rank, or {self._remedy}",
            found.ranks,
        )


# By default group, then by what they are and by ranks.
_AMONG: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], _Among]] = weakref.WeakKeyDictionary()


def _among(ranks: Sequence[int], remedy: str, what: str = "reducer") -> _Among:
    key = what, tuple(sorted(ranks))
    return _AMONG.setdefault(dist.group.WORLD, {}).setdefault(key, _Among(ranks, remedy, what))
