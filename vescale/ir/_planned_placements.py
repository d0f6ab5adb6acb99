"""What the entries of a plan say of each tensor, axis by axis, with the entry that said it; disagreements are findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._findings import Findings
from vescale.ir._operations import Stage
from vescale.plans import ALL, Entry, MeshAxes, Source, placement_text

__all__ = ["AxisWords", "BoundaryWords", "Said", "StateWords"]


@dataclass(frozen=True)
class Said:
    """A placement on one axis and the entry that asks for it."""

    placement: Placement
    entry: Entry


class AxisWords:
    """For each axis what was said of one tensor in one role (at rest, arriving, leaving, ...)."""

    def __init__(self, role: str = "", *, is_phase: bool = False) -> None:
        self._role = role
        self._is_phase = is_phase
        self._said: dict[str, Said] = {}

    def say(self, axis: str, placement: Placement, entry: Entry, name: str, findings: Findings) -> bool:
        """Record it; a different placement said before is a conflict (False), and the first one stays."""
        before = self._said.setdefault(axis, Said(placement, entry))
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

    def adopt(self, other: AxisWords, name: str, findings: Findings) -> None:
        """Take over what ``other`` says too."""
        for axis, said in other._said.items():
            self.say(axis, said.placement, said.entry, name, findings)

    def get(self, axis: str) -> Said | None:
        return self._said.get(axis)

    def items(self) -> Mapping[str, Said]:
        return self._said

    def __bool__(self) -> bool:
        return bool(self._said)

    def stage(self, axes: MeshAxes) -> Stage:
        """None on axes nobody spoke of."""
        return tuple(self._said[axis].placement if axis in self._said else None for axis in axes)

    def complete(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Replicate on axes nobody spoke of."""
        return tuple(placement if placement is not None else Replicate() for placement in self.stage(axes))


def _at(source: Source | None) -> str:
    return f" ({source})" if source is not None else ""


@dataclass
class StateWords:
    """Of one parameter or buffer: at rest, while its module computes, while its backward runs, its gradient."""

    init: AxisWords = field(default_factory=lambda: AxisWords("at rest", is_phase=True))
    forward: AxisWords = field(default_factory=lambda: AxisWords("while it runs", is_phase=True))
    backward: AxisWords = field(default_factory=lambda: AxisWords("in the backward", is_phase=True))
    annotated: AxisWords = field(default_factory=AxisWords)
    grad: AxisWords = field(default_factory=lambda: AxisWords("for the gradient"))
    grad_annotated: AxisWords = field(default_factory=lambda: AxisWords("for the gradient"))

    def running(self, axes: MeshAxes) -> tuple[Placement, ...]:
        """Complete placements while the module computes: as at rest where nothing else was said."""
        return tuple(
            said.placement if (said := self.forward.get(axis) or self.init.get(axis)) is not None else Replicate()
            for axis in axes
        )


@dataclass
class BoundaryWords:
    """Of one input or output of a module."""

    dst: AxisWords = field(default_factory=AxisWords)
    src: AxisWords = field(default_factory=lambda: AxisWords("as source"))
    grad_src: AxisWords = field(default_factory=lambda: AxisWords("as source of the gradient"))
    grad_dst: AxisWords = field(default_factory=lambda: AxisWords("for the gradient"))
    annotated: AxisWords = field(default_factory=AxisWords)
    entries: list[Entry] = field(default_factory=list)

    def adopt(self, other: BoundaryWords, name: str, findings: Findings) -> None:
        """Take over what is said of all inputs (or outputs) of the module."""
        for mine, theirs in zip(self._words(), other._words()):
            mine.adopt(theirs, name, findings)
        self.entries += [entry for entry in other.entries if entry not in self.entries]

    def _words(self) -> tuple[AxisWords, ...]:
        return self.dst, self.src, self.grad_src, self.grad_dst, self.annotated
