"""``Residency``: what a group of parameters has in memory, as a state machine. The code reads its contract, ``CONTRACT``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from vescale.errors import Coded

CONTRACT = """
===========  ==========  ========  =====  =============================================================================
state        registered  gathered  piece  meaning
===========  ==========  ========  =====  =============================================================================
sharded      sharded     no        no     at rest
kept piece   sharded     no        yes    between forward and backward, with a number for ``reshard_after_forward``
gathering    sharded     yes       no     an all-gather writes the gathered buffer
gathered     sharded     yes       no     whole parameters are there; nothing that runs uses them
unsharded    unsharded   yes       no     a forward, a backward, or the caller of unshard() uses them
borrowed     sharded     yes       no     a reduction reads gradients that have taken the place of the parameters
===========  ==========  ========  =====  =============================================================================

registered: the form of the parameters that modules have. Whatever memory is kept, it is the sharded one where the module
runs neither forward nor backward: iterated, named, hooked, cleared and written to, parameters are those of the optimizer.
gathered: the buffer of whole parameters is allocated. piece: a copy of an equal part of it is allocated, until it has been
gathered from. Where a device computes on streams, memory that is freed returns to the allocator with the gather after the
next one, or this group's own; nothing reads its contents meanwhile. Memory of gradients and shards is apart from this.

===========  ==========  ===========  ==============================  ==================================================
state        event       next state   communication                   when
===========  ==========  ===========  ==============================  ==================================================
sharded      gather      gathering    all-gather over the shard axis  the parameters are needed
sharded      reshard     sharded      none
kept piece   gather      gathering    all-gather among neighbours     backward needs the parameters
kept piece   reshard     sharded      none                            an iteration begins, or ends
gathering    gather      gathering    none
gathering    arrive      gathered     none                            the all-gather is done
gathered     gather      gathered     none
gathered     use         unsharded    none                            a forward or backward begins
gathered     reshard     sharded      none                            the parameters are no longer needed, or have changed
gathered     borrow      borrowed     none                            a backward that nothing announced has ended
unsharded    gather      unsharded    none
unsharded    leave       gathered     none                            a forward or backward has ended, and memory stays
unsharded    reshard     sharded      none                            the parameters are no longer needed
unsharded    keep piece  kept piece   none                            a forward has ended
unsharded    borrow      borrowed     none                            a backward has ended
borrowed     reshard     borrowed     none
borrowed     give back   sharded      none                            the reduction is done
any          abandon     sharded      none                            an exception has ended a forward or backward
===========  ==========  ===========  ==============================  ==================================================

Any other pair of state and event raises ResidencyError.
"""


class Residency(Enum):
    """A state of :data:`CONTRACT`."""

    __hash__ = object.__hash__  # members are one object each, and Enum's own is a call into Python

    SHARDED = "sharded"
    KEPT_PIECE = "kept piece"
    GATHERING = "gathering"
    GATHERED = "gathered"
    UNSHARDED = "unsharded"
    BORROWED = "borrowed"


class Event(Enum):
    """An event of :data:`CONTRACT`."""

    __hash__ = object.__hash__

    GATHER = "gather"
    ARRIVE = "arrive"
    RESHARD = "reshard"
    KEEP_PIECE = "keep piece"
    USE = "use"
    LEAVE = "leave"
    BORROW = "borrow"
    GIVE_BACK = "give back"
    ABANDON = "abandon"


class ResidencyError(Coded, RuntimeError):
    """An event in a state in which it must not happen."""

    code = "VS0602"

    def __init__(self, group: str, state: Residency, event: Event) -> None:
        legal = ", ".join(repr(one.value) for (of, one) in TRANSITIONS if of is state)
        super().__init__(
            f"group {group!r} of fully_shard is {state.value!r} and got the event {event.value!r}; expected one of {legal}. "
            "This is an error of the engine, or of code that drives it from several threads"
        )


@dataclass(frozen=True)
class Holding:
    """Of a state: whether unsharded parameters are registered, the gathered buffer is allocated, and a piece of it."""

    registered: bool
    gathered: bool
    piece: bool


def _rows(table: int) -> list[list[str]]:
    """The cells of one of the tables, without its header."""
    lines = CONTRACT.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("===")][3 * table :]
    ends = [len(rule) for rule in lines[rules[0]].split("  ")]
    starts = [sum(ends[:column]) + 2 * column for column in range(len(ends))]
    rows = lines[rules[1] + 1 : rules[2]]
    return [[row[start : start + width].strip() for start, width in zip(starts, ends)] for row in rows]


HOLDINGS = MappingProxyType(
    {
        Residency(state): Holding(registered == "unsharded", gathered == "yes", piece == "yes")
        for state, registered, gathered, piece, _ in _rows(0)
    }
)
TRANSITIONS = MappingProxyType(
    {
        (state, Event(event)): (Residency(to), "" if communication == "none" else communication)
        for of, event, to, communication, _ in _rows(1)
        for state in (Residency if of == "any" else (Residency(of),))
    }
)
"""(state, event) -> (next state, the collective that is started)."""
