"""``OrderWatch``: ranks that wait for each other in collectives of units that do not pair learn it while they wait."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch.distributed as dist

from vescale.agreement import Apart, PostedOrder, Round
from vescale.comm import look_while_waiting, waiting_thread
from vescale.compat import note
from vescale.errors import OrderMismatchError

# ``OrderMismatchError``: ranks communicate for different units, or models, at one place of their order.


def different_modules(found: str, ranks: Sequence[int]) -> OrderMismatchError:
    return OrderMismatchError(
        f"ranks have run different modules that fully_shard (or a plan's unit) was given: {found}; a gather is a "
        "collective, and gathers of different modules mix their parameters. Run the same modules in the same order on every "
        "rank: give fully_shard the block that holds the experts, or run every expert on every rank, also with no token",
        ranks,
    )


GATHER, REDUCTION, COMPARISON, END_OF_BACKWARD = range(4)
_KINDS = ("a gather of", "a reduction of", "the comparison of gathers", "the end of the backward")
_SECONDS_TO_END, _SECONDS_TO_LOOK = 10, 30
_APART: list[bool] = []


class OrderWatch:
    """Of the ranks of a group, on one host with gloo; elsewhere it does nothing.

    Units of equal size are compared later, by digests. But where ranks gather or reduce different *numbers* of units, a
    gather of some meets a reduction, or the end of the step, of others. Each rank posts what it begins, which takes
    microseconds and waits for nobody; a rank that has waited for a second compares. Collectives that have begun cannot be
    taken back, so that the job ends: the process does when it exits, or 10 s later, whatever it waits for.

    Args:
        path: of a unit, by its number.
        tell: called before an error is raised.
    """

    def __init__(
        self, group: dist.ProcessGroup, path: Callable[[int], str], tell: Callable[[OrderMismatchError], None]
    ) -> None:
        self._group, self._path, self._tell = group, path, tell
        self._is_open = False
        self._posted: PostedOrder | None = None

    def open(self) -> None:
        """All ranks of the group call it together."""
        if not self._is_open:
            self._is_open = True
            ranks = dist.get_process_group_ranks(self._group)
            self._posted = PostedOrder.open(ranks, Round(ranks, f"collectives along {self._group.group_name}").place)
            if self._posted is not None:
                look_while_waiting(self)
                if len(ranks) > 2:  # gathers are messages
                    _look_for_others(weakref.ref(self))

    def post(self, kind: int, num_bytes: int = 0, unit: int = 0) -> None:
        """Before each collective. Raises OrderMismatchError if a rank has begun one that does not pair."""
        if self._posted is not None and not self._posted.post(kind, num_bytes, unit):
            end = time.monotonic() + _SECONDS_TO_LOOK
            while time.monotonic() < end:
                self.look(None, _KINDS[kind])
                time.sleep(0.1)

    def begin_anew(self) -> None:
        """All ranks have raised, and go on."""
        if self._posted is not None and not _APART:
            self._posted.begin_anew()

    def look(self, awaited: Sequence[int] | None, what: str, in_vain: bool = False) -> None:
        """See :class:`vescale.comm.Look`. Raises OrderMismatchError, on every rank that waits."""
        posted = self._posted
        found = posted.apart(awaited, what, in_vain) if posted is not None else None
        if posted is None or found is None:
            return
        error = different_modules(self._text(found), sorted(found.texts) or _minority(found))
        self._tell(error)
        posted.wait_until_all_have_found_it()
        end_soon()
        raise error

    def _text(self, found: Apart) -> str:
        texts = dict(found.texts)
        for rank, (kind, num_bytes, unit) in found.entries.items():
            of = f" {self._path(unit)} ({num_bytes} bytes)" if kind in (GATHER, REDUCTION) else ""
            texts[rank] = f"{_KINDS[kind]}{of}"
        ranks_of: dict[str, list[int]] = {}
        for rank in sorted(texts):
            ranks_of.setdefault(texts[rank], []).append(rank)
        return "they wait for each other, " + " and ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} in {text}"
            for text, ranks in ranks_of.items()
        )


def end_soon() -> None:
    """This process, which raises an error, waits in a collective that never ends."""
    _prepare()
    _APART.append(True)
    with suppress(OSError, AttributeError, ValueError):  # no stderr of a process
        faulthandler.dump_traceback_later(_SECONDS_TO_END, exit=True)


def _minority(found: Apart) -> list[int]:
    first = next(iter(found.entries.values()))
    return [rank for rank, entry in found.entries.items() if entry != first]


def _look_for_others(watch: weakref.ref[OrderWatch]) -> None:
    """In the place of threads that wait for messages, which cannot look, nor raise: the process ends."""

    def run() -> None:
        while (here := watch()) is not None:
            thread = waiting_thread()
            if thread is not None:
                try:
                    here.look(None, "a collective")
                except OrderMismatchError as error:
                    frame = sys._current_frames().get(thread)
                    with suppress(OSError, ValueError):
                        sys.stderr.write("".join(traceback.format_stack(frame)) + f"{type(error).__name__}: {error}\n")
                    _end_if_apart()
            del here
            time.sleep(0.5)

    threading.Thread(target=run, daemon=True, name="vescale order of collectives").start()


@functools.cache
def _prepare() -> None:
    note("gradients._order_watch:process", "atexit", "faulthandler")
    atexit.register(_end_if_apart)


def _end_if_apart() -> None:
    """A process group of gloo would wait at its end for collectives that never end, until its timeout."""
    if _APART:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)
