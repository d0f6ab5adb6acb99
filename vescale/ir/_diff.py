"""What two programs do differently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from vescale.ir._instruction import Hook, Instruction
from vescale.ir._merged_names import merge_repeats
from vescale.plans import MeshAxes

__all__ = ["Change", "ProgramDiff", "diff_instructions"]

_Place = tuple[str, Hook, str, int | str | None]


@dataclass(frozen=True)
class Change:
    """An instruction that only one program has (the other is None), or that does something else at the same place."""

    before: Instruction | None
    after: Instruction | None

    @property
    def path(self) -> str:
        found = self.before or self.after
        assert found is not None
        return found.path


@dataclass(frozen=True)
class ProgramDiff:
    """False when the programs are equal. ``str()`` gives lines that begin with ``-``, ``+`` or ``~`` (before => after),
    repeated layers merged."""

    axes_before: MeshAxes
    axes_after: MeshAxes
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes) or self.axes_before != self.axes_after

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        if self.axes_before != self.axes_after:
            yield f"~ mesh {self.axes_before} => {self.axes_after}"
        for path, (sign, rest), _ in merge_repeats(
            (change.path, self._sign_and_rest(change)) for change in self.changes
        ):
            yield f"{sign} {path}{rest}"

    def _sign_and_rest(self, change: Change) -> tuple[str, str]:
        before = change.before.text(self.axes_before)[len(change.path) :] if change.before is not None else ""
        after = change.after.text(self.axes_after)[len(change.path) :] if change.after is not None else ""
        if change.before is None or change.after is None:
            return ("+", after) if change.before is None else ("-", before)
        return "~", f"{before} => {change.after.op.text(self.axes_after)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: the mesh of each side when they differ, and every change, layers not merged."""
        data: dict[str, Any] = {"equal": not self, "changes": []}
        if self.axes_before != self.axes_after:
            data["mesh"] = {"before": str(self.axes_before), "after": str(self.axes_after)}
        for change in self.changes:
            data["changes"].append(
                {
                    "before": change.before.text(self.axes_before) if change.before is not None else None,
                    "after": change.after.text(self.axes_after) if change.after is not None else None,
                }
            )
        return data


def diff_instructions(
    axes: MeshAxes, instructions: Sequence[Instruction], other_axes: MeshAxes, others: Sequence[Instruction]
) -> ProgramDiff:
    """See :meth:`vescale.ir.Program.diff`. The order of instructions matters only among those of one place."""
    old, new = _by_place(instructions), _by_place(others)
    changes = []
    for place in dict.fromkeys((*old, *new)):
        pairs = list(zip_longest(old.get(place, ()), new.get(place, ())))
        changes += [Change(one, other) for one, other in pairs if not _same(one, other, axes, other_axes)]
    return ProgramDiff(axes, other_axes, tuple(changes))


def _same(one: Instruction | None, other: Instruction | None, axes: MeshAxes, other_axes: MeshAxes) -> bool:
    """The same on the axes' names, whatever their sizes and order."""
    if one is None or other is None:
        return False
    return one.text(axes) == other.text(other_axes)


def _by_place(instructions: Sequence[Instruction]) -> dict[_Place, list[Instruction]]:
    places: dict[_Place, list[Instruction]] = {}
    for i in instructions:
        places.setdefault((i.path, i.hook, i.target, i.index), []).append(i)
    return places
