"""``Program``: what a plan does to a model, as an ordered tuple of frozen instructions."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vescale.ir._ops import Op
from vescale.ir._repeat import merge_repeats
from vescale.plans import MeshAxes, Source

if TYPE_CHECKING:
    from vescale.ir._diff import ProgramDiff

__all__ = ["Hook", "Instruction", "Program"]


class Hook(enum.Enum):
    """When an instruction runs, relative to the module it names; in the order of a training step."""

    INIT = "init"  # parallelize(): parameters and buffers are placed
    FORWARD_PRE = "forward_pre"  # before the forward, on inputs and on parameters (unshard)
    FORWARD = "forward"  # around the forward: factory and local regions
    FORWARD_POST = "forward_post"  # after it, on outputs
    BACKWARD = "backward"  # on a parameter's gradient


@dataclass(frozen=True)
class Instruction:
    """``path.hook:target:index:op``, for example ``model.layers.0.mlp.forward_pre:<in>:0:redist(->tp=R)``.

    Attributes:
        path: the module's name in the model, ``""`` for the model itself. A module with several names has instructions
            under the first only.
        hook: when it runs.
        target: ``<in>``, ``<out>``, or the name of a parameter or buffer relative to the module; ``<self>`` for regions
            and units. A tensor with several names (tied weights) is placed once, under the first.
        index: which input or output: its name in the signature of ``forward``, however it is passed, or its position
            where the signature has no name for it. None: where there is a choice, every one that no other instruction of
            the same path, hook and target names.
        op: what is done.
        source: the plan's line that asked for it; not part of the instruction's identity.
    """

    path: str
    hook: Hook
    target: str
    index: int | str | None
    op: Op
    source: Source | None = field(default=None, compare=False)

    def text(self, axes: MeshAxes) -> str:
        place = f"{self.path}.{self.hook.value}" if self.path else self.hook.value
        return f"{place}:{self.target}:{'*' if self.index is None else self.index}:{self.op.text(axes)}"


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
        from vescale.ir._json import program_to_json

        return program_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Raises ValueError saying what is wrong with the text. Nothing in it is executed."""
        from vescale.ir._json import program_from_json

        return program_from_json(text)

    def diff(self, other: Program) -> ProgramDiff:
        """What ``other`` does differently; false when nothing, ``str()`` of it for people."""
        from vescale.ir._diff import diff_programs

        return diff_programs(self, other)

    def digest(self) -> str:
        """SHA-256 of the mesh and the text: equal on two ranks exactly when they would do the same."""
        return hashlib.sha256(f"{self.axes}\n{self.to_text()}".encode()).hexdigest()
