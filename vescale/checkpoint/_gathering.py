"""One exchange between the ranks of a job that does not keep their training back: rounds that may run on a thread."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from vescale.agreement import Round
from vescale.checkpoint._replicas import as_text, from_text, has_other_ranks
from vescale.errors import CheckpointError, ConsensusError, SaveFailedError

# What a message begins with: of a rank that has something to say, and of one that has failed.
_HAS_COME, _FAILED = "+", "-"

_EVERY_RANK = "every rank must call it, not only some (as in `if rank == 0:`), unless a rank has ended or hangs"


class _Calls(Round):
    """Rounds of all ranks, in calls of the user that need every rank."""

    def late_text(self, about: str, late: Sequence[int], seconds: int) -> str:
        return (
            f"{_late(late, about)} for {seconds} s, and the others wait until {self.timeout} have passed; {_EVERY_RANK}"
        )


class Gathering:
    """Rounds in which the first rank gets a message of each, does something, and tells all how it went.

    Made by all ranks in the same order, on the thread that has their process group; rounds may run on another thread.

    Args:
        call: what the user has called, the same on all ranks: ranks that come by different calls get an error.

    Attributes:
        has_failed: a round has ended with an error, on all ranks that have come to it.
        rounds: of all ranks; None where there is one rank.
    """

    def __init__(self, call: str) -> None:
        self._call = call
        self.has_failed = False
        self.rounds = _Calls(range(dist.get_world_size()), "checkpoint") if has_other_ranks() else None
        self.rank, self.world = (0, 1) if self.rounds is None else (self.rounds.index, len(self.rounds.ranks))

    def round(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        """``first`` runs on the first rank with all messages, in rank order; every rank gets what it returns.

        ``message``: a function is called once the others can see that this rank has come. Ranks that have not come
        for 3 seconds are named in a warning.

        Raises CheckpointError where ``message`` or ``first`` raised anything, or ranks do not come; on every rank that
        does. What is no Exception (Ctrl-C) is raised at once where it is, and the others hear of it.
        """
        rounds, failure = self.rounds, None
        if rounds is None:
            return self._answer_alone(message, first)

        def own() -> str:
            nonlocal failure
            try:
                found = _HAS_COME + (message if isinstance(message, str) else message())
            except Exception as error:
                failure, found = error, _FAILED + as_text(error)
            return json.dumps([self._call, found])

        try:
            answer = dict(
                json.loads(rounds.lead(own, lambda found: json.dumps(_answered(found, first)), lambda: self._call))
            )
        except ConsensusError as error:
            answer = {"error": as_text(SaveFailedError(self._absence(error, rounds)))}
        except BaseException:
            self.has_failed = True
            raise
        if "error" in answer:
            self.has_failed = True
            raise from_text(answer["error"]) from failure
        return answer

    def _answer_alone(
        self, message: str | Callable[[], str], first: Callable[[Sequence[str]], dict[str, Any]]
    ) -> dict[str, Any]:
        try:
            return first([message if isinstance(message, str) else message()])
        except BaseException as error:
            self.has_failed = True
            if (error is not None and not isinstance(error, Exception)) or isinstance(error, CheckpointError):
                raise
            raise from_text(as_text(error)) from error

    def _absence(self, error: ConsensusError, rounds: Round) -> str:
        if error.failure:
            return f"rank {error.ranks[0]}: {error.failure}"
        if error.elsewhere:
            return (
                f"{_late(error.ranks, self._call)}, because ranks wait for each other: {error.elsewhere}; {_EVERY_RANK}"
            )
        return f"{_late(error.ranks, self._call)} within {rounds.timeout}; {_EVERY_RANK}"


def _late(ranks: Sequence[int], call: str) -> str:
    return f"ranks {sorted(ranks)} did not reach {call}"


def _answered(given: Sequence[str], first: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """What ``first`` returns for the messages of all ranks, or ``{"error": ...}``; as JSON has it."""
    calls, messages = zip(*map(json.loads, given))
    if len(set(calls)) > 1:
        places = ", ".join(f"rank {rank} in {call}" for rank, call in enumerate(calls))
        return {"error": as_text(SaveFailedError(f"ranks are in different calls: {places}; {_EVERY_RANK}"))}
    failed = [rank for rank, message in enumerate(messages) if message.startswith(_FAILED)]
    if failed:
        return {"error": as_text(from_text(messages[failed[0]][1:], f"rank {failed[0]}: "))}
    try:
        return dict(json.loads(json.dumps(first([message[1:] for message in messages]))))
    except Exception as error:
        return {"error": as_text(error)}


def first_rank_decides(call: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What the first rank's ``decide()`` returns, on every rank; called by all of them, in ``call`` of the user."""
    return Gathering(call).round("", lambda _: decide())


@contextlib.contextmanager
def together(call: str) -> Iterator[None]:
    """What the block raises on one rank, all ranks raise behind it; entered by all of them, in ``call`` of the user."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error

    def message() -> str:
        if failure is not None:
            raise failure
        return ""

    try:
        Gathering(call).round(message, lambda _: {})
    except CheckpointError as told:
        if failure is not None and (not isinstance(failure, CheckpointError) or not has_other_ranks()):
            raise failure from None
        raise told from failure
