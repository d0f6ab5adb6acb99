"""``ReducerTurn``: several reducers of the same ranks reduce one after the other, in one order on every rank."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from vescale.comm import (
    Board,
    Consensus,
    CrossWaitError,
    RankGoneError,
    all_reduce_,
    first_difference,
    group_of_ranks,
    wait_limit,
)
from vescale.compat import default_timeout, is_alone
from vescale.gradients._collective_order import OrderMismatchError

__all__ = ["ReducerTurn"]


class ReducerTurn:
    """The part of one reducer among those of the same ranks.

    Buckets of one reducer are launched in one order on every rank. Those of two would meet each other if ranks reduced in
    different orders: a sum of different parameters. While there is one reducer nothing is compared. With several,

    - ranks compare who reduces, before the first bucket of each backward: on one host with gloo in shared memory
      (:class:`vescale.comm.Board`, microseconds), elsewhere by an all-reduce of 16 bytes;
    - of several in one backward, the one that was reached first reduces while backward goes on, the others at its end.

    Args:
        ranks: whose collectives must match.
        name: of what is reduced.
        device: on which the ranks communicate.
    """

    def __init__(self, ranks: Sequence[int], name: Callable[[], str], device: torch.device) -> None:
        self._among = _among(ranks)
        self._among.num_made += 1
        self.number, self._device = self._among.num_made, device
        self._name = name
        self._is_taken = False
        self._current: Callable[[], object | None] = lambda: None
        self._give_up: Callable[[], None] = lambda: None
        self._is_removed = False
        self._among.add()

    @property
    def name(self) -> str:
        return f"{self._name()} (reducer {self.number} of these ranks)"

    def begin(self, current: Callable[[], object | None], give_up: Callable[[], None]) -> None:
        """The gradients of a backward have begun to arrive. ``current`` returns None when it has ended; ``give_up`` forgets
        them."""
        self._current, self._give_up = current, give_up
        if self not in self._among.open:
            self._among.references.append(weakref.ref(self))

    @property
    def may_launch(self) -> bool:
        """Whether buckets may be launched before the end of backward."""
        return self._is_taken or self._among.running[:1] in ([], [self])

    def take(self) -> None:
        """Before the first bucket of a backward is launched.

        Raises OrderMismatchError on every rank if another one is about to reduce for another reducer; gradients of this
        backward are dropped then.
        """
        if self._is_taken:
            return
        try:
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
        self._among.references = [weakref.ref(turn) for turn in self._among.open if turn is not self]

    def remove(self) -> None:
        """The reducer does nothing any more, on every rank."""
        self.end()
        if not self._is_removed:
            self._is_removed = True
            self._among.num_there -= 1


class _Among:
    """The reducers of the same ranks.

    Attributes:
        num_made: so far; num_there: of these, that have not been removed. The same on every rank, unlike what is freed.
        references: to turns whose gradients arrive, in the order in which they have begun.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        self.num_made = self.num_there = 0
        self.references: list[weakref.ref[ReducerTurn]] = []
        self._num_meetings = 0
        self._board: Board | None = None
        self._consensus: Consensus | None = None

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
        self._consensus = Consensus(self.ranks, "order of reducers")
        if dist.get_backend() == "gloo":
            self._board = Board.open(self.ranks, self._consensus.place)

    def meet(self, turn: ReducerTurn) -> None:
        if self.num_there < 2 or self._consensus is None:
            return
        self._num_meetings += 1
        if self._board is not None:
            is_alike = self._is_alike_on_board(self._board, turn)
        else:
            own = torch.tensor([turn.number, -turn.number], device=turn._device)
            group = group_of_ranks(self.ranks)
            high, low = all_reduce_(own, "max", group, requester="which reducer reduces").wait().tolist()
            is_alike = high == -low
        if not is_alike:
            self._raise(turn)

    def _is_alike_on_board(self, board: Board, turn: ReducerTurn) -> bool:
        what, number = f"the reduction of {turn.name}", self._num_meetings
        limit = (wait_limit() or default_timeout()).total_seconds()
        board.post(number, (turn.number, 0, 0), what)
        try:
            rows = board.wait(number, limit, what)
        except (TimeoutError, RankGoneError, CrossWaitError) as error:
            absent = [board.ranks[position] for position in board.absent(number)]
            raise OrderMismatchError(
                f"rank {dist.get_rank()} is before {what}, and ranks {absent} have not come: {error or f'{limit:g} s'}. "
                "Run the same backwards in the same order on every rank, or call reducer.finish() on ranks without one",
                absent,
            ) from None
        return len({row[0] for row in rows}) == 1

    def _raise(self, turn: ReducerTurn) -> NoReturn:
        consensus = self._consensus
        assert consensus is not None
        messages = consensus.exchange(json.dumps(turn.name).encode(), lambda: "comparing the order of reducers")
        names = {rank: [("", json.loads(message))] for rank, message in zip(consensus.ranks, messages)}
        with contextlib.suppress(RuntimeError):  # the rank that holds the store may exit after this: let all have read
            consensus.exchange(b"read", lambda: "leaving the comparison of the order of reducers")
        found = first_difference("what is reduced now", names)
        raise OrderMismatchError(
            f"ranks reduce gradients of different models: {found.text()}; their sums would mix parameters. Run the same "
            "backwards in the same order on every rank; reducer.finish() stands for one that reaches no parameter",
            found.ranks,
        )


# By default group, then by ranks.
_AMONG: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], _Among]] = weakref.WeakKeyDictionary()


def _among(ranks: Sequence[int]) -> _Among:
    key = tuple(sorted(ranks))
    return _AMONG.setdefault(dist.group.WORLD, {}).setdefault(key, _Among(key))
