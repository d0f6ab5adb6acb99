"""``Program``: what a plan does to a model, as an ordered tuple of frozen instructions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from vescale.ir._diff import ProgramDiff, diff_instructions
from vescale.ir._instruction import Instruction
from vescale.ir._json import instructions_from_json, instructions_to_json
from vescale.ir._merged_names import merge_repeats
from vescale.plans import MeshAxes

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """The instructions of one model on one mesh; the same on every rank.

    Attributes:
        axes: the mesh's axis names and sizes.
        instructions: in module order, then hook order, then the order of the plan.
    """

    axes: MeshAxes
    instructions: tuple[Instruction, ...]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def to_text(self, *, merge_layers: bool = False) -> str:
        """One instruction a line; the same under every hash seed and on every rank.

        ``merge_layers`` writes the instructions that repeated layers share once, as ``model.layers.0-31.mlp...``.
        """
        if not merge_layers:
            return "".join(f"{instruction.text(self.axes)}\n" for instruction in self.instructions)
        merged = merge_repeats((i.path, i.text(self.axes)[len(i.path) :]) for i in self.instructions)
        return "".join(f"{path}{rest}\n" for path, rest, _ in merged)

    def to_json(self) -> str:
        """The program as JSON text, with the plan's lines; :meth:`from_json` reads it back equal."""
        return instructions_to_json(self.axes, self.instructions)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Raises ValueError saying what is wrong with the text. Nothing in it is executed.

        Args:
            text: what :meth:`to_json` returned.
        """
        return cls(*instructions_from_json(text))

    def diff(self, other: Program) -> ProgramDiff:
        """What ``other`` does differently; false when nothing, ``str()`` of it for people."""
        return diff_instructions(self.axes, self.instructions, other.axes, other.instructions)

    def digest(self) -> str:
        """SHA-256 of the mesh and the text: equal on two ranks exactly when they would do the same."""
        return hashlib.sha256(f"{self.axes}\n{self.to_text()}".encode()).hexdigest()
