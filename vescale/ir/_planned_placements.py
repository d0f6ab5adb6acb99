"""The placements that a plan gives each tensor, axis by axis, each with its entry; entries that disagree become findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._findings import Findings
from vescale.ir._operations import Stage
from vescale.plans import ALL, Entry, MeshAxes, Source, placement_text

__all__ = ["PlannedAxes", "PlannedBoundary", "PlannedPlacement", "PlannedState"]


@dataclass(frozen=True)
class PlannedPlacement:
    """A placement on one axis and the entry that asks for it."""

    placement: Placement
    entry: Entry


class PlannedAxes:
    """The planned placement of one tensor on each axis, in one role (at rest, arriving, leaving, ...)."""

    def __init__(self, role: str = "", *, is_phase: bool = False) -> None:
        self._role = role
        self._is_phase = is_phase
        self._by_axis: dict[str, PlannedPlacement] = {}

    def record(self, axis: str, placement: Placement, entry: Entry, name: str, findings: Findings) -> bool:
        """Record a placement. If another one is recorded already, it stays, a finding is added, and False is returned."""
        before = self._by_axis.setdefault(axis, PlannedPlacement(placement, entry))
        if before.placement == placement:
            return True
        in_every_phase = self._is_phase and all(getattr(one, "phase", ALL) == ALL for one in (entry, before.entry))
        role = f" {self._role}" if self._role and not in_every_phase else ""
        findings.error(
            "conflict",
            f"{{names}} on axis {axis!r}{role}: '{entry.path}' says {placement_text(placement)}, but "
            f"'{before.entry.path}'{_at(before.entry.source)} says {placement_text(before.placement)}; keep one of the "
            "two, or make their paths disjoint: '(?!(PATH)$)' in front of one leaves out what PATH matches",
            entry.source,
            name,
        )
        return False

    def adopt(self, other: PlannedAxes, name: str, findings: Findings) -> None:
        """Record the placements of ``other``, too."""
        for axis, choice in other._by_axis.items():
            self.record(axis, choice.placement, choice.entry, name, findings)

    def get(self, axis: str) -> PlannedPlacement | None:
        return self._by_axis.get(axis)

    def items(self) -> Mapping[str, PlannedPlacement]:
        return self._by_axis

    def __bool__(self) -> bool:
        return bool(self._by_axis)

    def stage(self, axes: MeshAxes) -> Stage:
        """None on axes without a placement."""
        return tuple(self._by_axis[axis].placement if axis in self._by_axis else None for axis in axes)

    def complete(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Replicate on axes without a placement."""
        return tuple(placement if placement is not None else Replicate() for placement in self.stage(axes))


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None else ""


@dataclass
class PlannedState:
    """The planned placements of a parameter or buffer at rest, in forward and in backward, and of its gradient."""

    init: PlannedAxes = field(default_factory=lambda: PlannedAxes("at rest", is_phase=True))
    forward: PlannedAxes = field(default_factory=lambda: PlannedAxes("while it runs", is_phase=True))
    backward: PlannedAxes = field(default_factory=lambda: PlannedAxes("in the backward", is_phase=True))
    annotated: PlannedAxes = field(default_factory=PlannedAxes)
    grad: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))
    grad_annotated: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))

    def running_at(self, axis: str) -> PlannedPlacement | None:
        """The planned placement on one axis while the module computes."""
        return self.forward.get(axis) or self.init.get(axis)

    def running(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Complete placements while the module computes: those at rest unless the plan gives others."""
        return tuple(
            choice.placement if (choice := self.running_at(axis)) is not None else Replicate() for axis in axes
        )


@dataclass
class PlannedBoundary:
    """The planned placements of an input or output of a module."""

    dst: PlannedAxes = field(default_factory=PlannedAxes)
    src: PlannedAxes = field(default_factory=lambda: PlannedAxes("as source"))
    grad_src: PlannedAxes = field(default_factory=lambda: PlannedAxes("as source of the gradient"))
    grad_dst: PlannedAxes = field(default_factory=lambda: PlannedAxes("for the gradient"))
    annotated: PlannedAxes = field(default_factory=PlannedAxes)
    entries: list[Entry] = field(default_factory=list)

    def adopt(self, other: PlannedBoundary, name: str, findings: Findings) -> None:
        """Record what the plan gives for all inputs (or outputs) of the module."""
        for mine, theirs in zip(self._roles(), other._roles()):
            mine.adopt(theirs, name, findings)
        self.entries += [entry for entry in other.entries if entry not in self.entries]

    def _roles(self) -> tuple[PlannedAxes, ...]:
        return self.dst, self.src, self.grad_src, self.grad_dst, self.annotated
