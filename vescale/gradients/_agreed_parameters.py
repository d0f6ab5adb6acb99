"""``AgreedParameters``: the parameters of a reducer, numbered alike on all ranks."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.agreement import Round, compare_descriptions
from vescale.compat import ParameterRow
from vescale.errors import GradientError
from vescale.gradients._data_parallel_axes import unite
from vescale.gradients._hooked_parameters import HookedParameters
from vescale.gradients._parameter import GradientRule, ReducedParameter
from vescale.gradients._reducer_turns import ReducerTurn
from vescale.gradients._reduction import Arrival

# What ranks must agree on before their collectives match: the parameters of a reducer, and how gradients arrive.


@dataclass(frozen=True)
class ObservedArrival:
    """A gradient that arrived without having a slot: the parameter's index, how it arrived, and how often."""

    index: int
    arrival: Arrival
    count: int


def agree_on_parameters(described: Sequence[tuple[str, str]], what: str, consensus: Round) -> None:
    """Compare names and descriptions of the parameters, and the settings of the reducers, on all ranks.

    Raises GradientError on every rank, naming the first parameter that differs.
    """
    own = {"reducers": [("settings", what)], "parameters": described}
    found = compare_descriptions(own, consensus, lambda: "making a GradientReducer")
    if found is not None:
        raise GradientError(
            f"{found.text()}; build the same model with the same requires_grad, and the same reducer, on every rank"
        )


def agree_on_arrivals(
    observed: Sequence[ObservedArrival],
    unseen: Sequence[int],
    name_of: Callable[[int], str],
    describe: Callable[[ObservedArrival], str],
    consensus: Round,
) -> tuple[list[ObservedArrival], list[int]]:
    """The gradients that need slots on any rank, and the parameters that are ``unseen`` on any rank.

    Each in the order of the first rank that has them; the same on every rank.

    Ranks may use different parameters, but not the same parameter in different ways: this raises GradientError,
    which names the parameter, on every rank.
    """
    first = (
        (f"{name_of(observed[0].index)}.grad arrives as {describe(observed[0])} for the first time") if observed else ""
    )

    def about() -> str:
        return first or "no gradient arrived in this backward"

    payload: Any = [(o.index, o.arrival.placements, o.arrival.dtype, o.count) for o in observed], list(unseen)
    found: dict[int, list[ObservedArrival]] = {}  # of the first rank with each message: others say nothing new
    unseen_anywhere: dict[int, None] = {}
    messages: set[bytes] = set()
    for rank, message in zip(consensus.ranks, consensus.exchange(pickle.dumps(payload), about)):
        if message in messages:
            continue
        messages.add(message)
        rows, indices = pickle.loads(message)
        found[rank] = [
            ObservedArrival(index, Arrival(placements, dtype), count) for index, placements, dtype, count in rows
        ]
        unseen_anywhere.update(dict.fromkeys(indices))
    merged: dict[tuple[int, Arrival], ObservedArrival] = {}
    kinds: dict[int, tuple[int, frozenset[Arrival]]] = {}
    for rank, list_ in found.items():
        own: dict[int, set[Arrival]] = {}
        for item in list_:
            own.setdefault(item.index, set()).add(item.arrival)
            known = merged.get((item.index, item.arrival))
            if known is None or known.count < item.count:
                merged[item.index, item.arrival] = item
        for index, arrivals in own.items():
            other, expected = kinds.setdefault(index, (rank, frozenset(arrivals)))
            if arrivals != expected:
                texts = [
                    " and ".join(sorted(describe(ObservedArrival(index, a, 1)) for a in some))
                    for some in (arrivals, expected)
                ]
                raise GradientError(
                    f"{name_of(index)}.grad arrives as {texts[0]} on rank {rank}, but as {texts[1]} on rank {other}; "
                    "run the same model code on inputs with the same placements on every rank"
                )
    return list(merged.values()), list(unseen_anywhere)


class AgreedParameters:
    """Changes of the module are watched at once, and agreed on by the ranks at the end of the next step.

    Attributes:
        agreed: the parameters that the ranks have agreed on, by number.
        is_outdated: whether removed parameters still have slots in the schedule.
        turn: of the reducer, among those of the same ranks.
    """

    def __init__(self, hooked: HookedParameters, mesh: DeviceMesh, settings: str, timeout: timedelta | None) -> None:
        self._hooked = hooked
        self.hooks_of_programs = hooked.waiting
        self.agreed: list[ReducedParameter] = []
        self.is_outdated = False
        self._row: ParameterRow | None = None  # of these and the new ones
        self._new: list[ReducedParameter] = []  # watched, but not agreed on by the ranks yet
        self._removed: list[ReducedParameter] = []  # no longer in the module, but not agreed on yet
        self._unoffered: list[ReducedParameter] = []  # of the agreed ones; may have got slots since
        new, _ = hooked.changes()
        self._consensus = Round(_ranks(new, mesh), "GradientReducer", timeout)
        self._agree(new, settings)
        self.turn = ReducerTurn(self._consensus.ranks, self._name, torch.device(mesh.device_type))
        hooked.watch(new)

    def __iter__(self) -> Iterator[ReducedParameter]:
        """All watched parameters."""
        yield from self.agreed
        yield from self._new

    @property
    def row(self) -> ParameterRow:
        """All watched parameters."""
        if self._row is None:
            self._row = ParameterRow([reduced.parameter for reduced in self])
        return self._row

    def add(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> None:
        """Agree on more parameters, and watch them."""
        new = self._hooked.wrap(parameters)
        self._agree(new, "more parameters")
        self._hooked.watch(new)

    def _agree(self, new: Sequence[ReducedParameter], what: str) -> None:
        """Compare new parameters with those of other ranks, and number them."""
        agree_on_parameters([(reduced.name, reduced.describe()) for reduced in new], what, self._consensus)
        self.agreed += new
        self._row = None
        self._unoffered = [reduced for reduced in self.agreed if not reduced.is_offered]
        for index, reduced in enumerate(self.agreed):
            reduced.index = index

    def check_changes(self) -> None:
        """Watch new parameters of the module, and release removed ones; no communication."""
        if not self._hooked.have_changed():
            return
        new, removed = self._hooked.changes()
        self._hooked.watch(new)
        self._hooked.release(removed)
        self._new = [reduced for reduced in self._new if reduced not in removed] + new
        self._row = None
        self._removed += [reduced for reduced in self.agreed if reduced in removed]

    def agree_on_changes(self) -> set[ReducedParameter]:
        """Number new parameters. Returns the removed ones, which keep their slots until the end of this step."""
        if not self._new and not self._removed:
            return set()
        removed = set(self._removed)
        self.agreed = [reduced for reduced in self.agreed if reduced not in removed]
        names = sorted(reduced.name for reduced in removed)
        self._agree(sorted(self._new, key=lambda reduced: reduced.name), f"no longer present: {names}")
        self.is_outdated |= bool(removed)
        self._new, self._removed, self._row = [], [], None
        return removed

    def has_unoffered(self) -> bool:
        """Whether the ranks have not agreed on slots for all trained parameters."""
        if not self._unoffered:  # as in most steps
            return False
        self._unoffered = [reduced for reduced in self._unoffered if not reduced.is_offered]
        return any(reduced.parameter.requires_grad for reduced in self._unoffered)

    def agree_on_arrivals(
        self, arrivals: Mapping[tuple[ReducedParameter, Arrival], int]
    ) -> list[tuple[ReducedParameter, Arrival, int]]:
        """The gradients that need slots, with their number of arrivals in a backward; the same on every rank.

        ``arrivals`` are those of this rank. Parameters without any gradient get slots, too, if their arrival is known.
        """
        observed = [ObservedArrival(reduced.index, arrival, count) for (reduced, arrival), count in arrivals.items()]
        unseen = [r.index for r in reversed(self.agreed) if r.parameter.requires_grad and not r.is_offered]
        agreed, offered = agree_on_arrivals(
            observed,
            unseen,
            lambda index: self.agreed[index].name,
            lambda found: self.agreed[found.index].arrival_text(found.arrival),
            self._consensus,
        )
        seen = {item.index for item in agreed}
        found = [(self.agreed[item.index], item.arrival, item.count) for item in agreed]
        for reduced in (self.agreed[index] for index in offered):
            # A rank may use a parameter that others never use. On a DTensor's own axes the arrival is unknown, but there
            # every rank uses what any rank uses.
            reduced.is_offered = True
            if reduced.index not in seen and not reduced.slots:
                found.append((reduced, reduced.known_arrival(), 1))
        return found

    def drop_slots(self) -> None:
        """Called when the schedule starts anew."""
        self.is_outdated = False
        for reduced in self.agreed:
            reduced.drop_slots()
            reduced.notify(True)
        self._unoffered = list(self.agreed)

    def _name(self) -> str:
        names = [reduced.name for reduced in self]
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return f"{names[0]}{others}" if names else "nothing"

    def drop_gradients(self) -> None:
        """Forget this backward's; complete ones of before are kept aside."""
        for reduced in self:
            reduced.parameter.grad = None

    def release_all(self) -> None:
        self.turn.remove()
        self._hooked.release(list(self))
        for listed in (self.agreed, self._new, self._removed):
            listed.clear()
        self._row = None


def _ranks(parameters: Sequence[ReducedParameter], mesh: DeviceMesh) -> tuple[int, ...]:
    """The ranks whose collectives must match this rank's: those of a mesh that all parameters' meshes are parts of, as far
    as such a mesh is known."""
    largest = mesh
    for own in {reduced.destination.mesh for reduced in parameters} - {None}:
        assert own is not None
        union = unite(own, largest)
        if union is not None and union.mesh.size() > largest.size():
            largest = union.mesh
    return tuple(sorted(largest.mesh.flatten().tolist()))
