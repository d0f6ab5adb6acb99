"""``Instruction``: one step that the runtime executes, at one hook of one module."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vescale.ir._operations import Op
from vescale.plans import MeshAxes, Source

__all__ = ["Hook", "Instruction"]


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
