"""The state machines of the engine: what a group of parameters has in memory (``Residency``), and where a root, its modules
and their groups are in a step (``Stage``, ``Turn``). The code reads these contracts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

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


class ResidencyError(Coded, RuntimeError, code="VS0603"):
    """An event in a state in which it must not happen."""

    def __init__(self, what: str, state: Enum, event: Enum, legal: Iterable[tuple[Any, Any]]) -> None:
        events = ", ".join(repr(one.value) for of, one in legal if of is state)
        super().__init__(
            f"{what} of fully_shard is {state.value!r} and got the event {event.value!r}; expected one of {events}. "
            "This is a bug in vescale, or the module is used by several threads"
        )


@dataclass(frozen=True)
class Holding:
    """Of a state: whether unsharded parameters are registered, the gathered buffer is allocated, and a piece of it."""

    registered: bool
    gathered: bool
    piece: bool


def rows(contract: str, table: int) -> list[list[str]]:
    """The cells of one of the tables of a contract, without its header."""
    lines = contract.splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("===")][3 * table :]
    ends = [len(rule) for rule in lines[rules[0]].split("  ")]
    starts = [sum(ends[:column]) + 2 * column for column in range(len(ends))]
    found = lines[rules[1] + 1 : rules[2]]
    return [[row[start : start + width].strip() for start, width in zip(starts, ends)] for row in found]


HOLDINGS = MappingProxyType(
    {
        Residency(state): Holding(registered == "unsharded", gathered == "yes", piece == "yes")
        for state, registered, gathered, piece, _ in rows(CONTRACT, 0)
    }
)
TRANSITIONS = MappingProxyType(
    {
        (state, Event(event)): (Residency(to), "" if communication == "none" else communication)
        for of, event, to, communication, _ in rows(CONTRACT, 1)
        for state in (Residency if of == "any" else (Residency(of),))
    }
)
"""(state, event) -> (next state, the collective that is started)."""


# Where a step is.

STEP_CONTRACT = """
========  ==============================================================================================================
a root    meaning
========  ==============================================================================================================
idle      nothing runs. Gathered memory: what is kept on purpose. Streams have been joined, or gradients accumulate
forward   the outermost forward runs: of the root, or of a module below it alone
backward  a backward has reached some module, and its end has not concluded it; after an exception: it never will
nested    a forward inside of a backward (activation checkpointing), or a backward inside of a forward
========  ==============================================================================================================

========  ===============  ========  ===================================================================================
a root    event            next      what happens
========  ===============  ========  ===================================================================================
idle      begin forward    forward   gathers wait for the optimizer; ranks compare their steps
idle      begin backward   backward  a callback waits for the backward's end
forward   end forward      idle      the gather stream frees what the computation has left; copies from the host have ended
forward   begin backward   nested    as from idle
backward  begin forward    nested    nothing
backward  conclude         idle      the computation waits for all reductions; flags tell what other ranks have reduced
nested    end forward      backward  as from forward
nested    conclude         forward   as from backward
idle      abandon forward  idle      after an exception: the sharded parameters are registered, gathered ones are freed
forward   abandon forward  idle      the same
backward  abandon forward  backward  the same
nested    abandon forward  backward  the same
any       abandon          idle      after an exception: what runs is waited for, and all memory is freed
========  ===============  ========  ===================================================================================

========  ==============  ========  ====================================================================================
a module  event           next      what happens
========  ==============  ========  ====================================================================================
idle      begin forward   forward   all-gathers on the gather stream, for which the computation waits
idle      begin backward  backward  the same, and those of the group that ran before
idle      end forward     idle      a backward inside of this forward has concluded it
idle      conclude        idle      nothing: the backward has not reached it
forward   begin forward   forward   nothing: a call inside of its own
forward   end forward     idle      groups reshard
forward   begin backward  backward  as from idle
forward   conclude        idle      as from backward
backward  begin forward   backward  all-gathers, for activation checkpointing
backward  end forward     backward  nothing
backward  begin backward  backward  nothing
backward  conclude        idle      groups reshard, and reduce-scatter what has not been reduced
any       abandon         idle      the sharded parameters are registered
========  ==============  ========  ====================================================================================

========  ========  ========  ==========================================================================================
a group   event     next      what happens
========  ========  ========  ==========================================================================================
rest      forward   due       its gradients are to be reduced, also if no backward reaches it
rest      backward  running   gathered for the computation; gradients come
rest      reduce    reduced   as from due: several backwards have accumulated
due       forward   due       nothing
due       backward  running   as from rest
due       reduce    reduced   reduce-scatter on the reduce stream, from memory that it borrows
running   forward   running   nothing
running   backward  running   nothing
running   pause     due       the gradients of one call are there, and another call is to come
running   reduce    reduced   as from due
reduced   forward   due       as from rest
reduced   backward  running   as from rest
reduced   pause     reduced   another call is to come, which needs the parameters
reduced   reduce    reduced   as from due
due       pause     due       a call whose beginning was not announced
rest      pause     rest      the same
any       conclude  rest      whatever is due is reduced before
========  ========  ========  ==========================================================================================

Any other pair of state and event raises ResidencyError.
"""


class Stage(Enum):
    """A state of a root, or a module, of :data:`STEP_CONTRACT`."""

    __hash__ = object.__hash__

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    NESTED = "nested"


class Turn(Enum):
    """A state of a group of :data:`STEP_CONTRACT`."""

    __hash__ = object.__hash__

    REST = "rest"
    DUE = "due"
    RUNNING = "running"
    REDUCED = "reduced"


class Move(Enum):
    """An event of :data:`STEP_CONTRACT`."""

    __hash__ = object.__hash__

    BEGIN_FORWARD = "begin forward"
    END_FORWARD = "end forward"
    BEGIN_BACKWARD = "begin backward"
    CONCLUDE = "conclude"
    ABANDON = "abandon"
    ABANDON_FORWARD = "abandon forward"
    FORWARD = "forward"
    BACKWARD = "backward"
    PAUSE = "pause"
    REDUCE = "reduce"


StateT = TypeVar("StateT", bound=Enum)


def _table(number: int, states: type[StateT]) -> Mapping[tuple[StateT, Move], StateT]:
    own = [states(state) for state in dict.fromkeys(row[0] for row in rows(STEP_CONTRACT, number)) if state != "any"]
    return MappingProxyType(
        {
            (state, Move(event)): states(to)
            for of, event, to, _ in rows(STEP_CONTRACT, number)
            for state in (own if of == "any" else (states(of),))
        }
    )


ROOT, MODULE, GROUP = _table(1, Stage), _table(2, Stage), _table(3, Turn)
"""(state, event) -> next state."""
