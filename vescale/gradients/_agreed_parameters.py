"""``AgreedParameters``: the parameters of a reducer, numbered alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import Consensus
from vescale.compat import ParameterRow
from vescale.gradients._agreement import ObservedArrival, agree_on_arrivals, agree_on_parameters
from vescale.gradients._axis_sets import unite
from vescale.gradients._hooked_parameters import HookedParameters
from vescale.gradients._parameter import GradientRule, ReducedParameter
from vescale.gradients._reducer_turns import ReducerTurn
from vescale.gradients._reduction import Arrival

__all__ = ["AgreedParameters"]


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
        self._consensus = Consensus(_ranks(new, mesh), "GradientReducer", timeout)
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
        self._agree(sorted(self._new, key=lambda reduced: reduced.name), f"no longer there: {names}")
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
