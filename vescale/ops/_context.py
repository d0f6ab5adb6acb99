"""What a function of an op family is told about the model whose forward calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement


class OpContext(Protocol):
    """A forward of a parallelized model, as the functions in the registry see it: their first argument."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of every DTensor of the model."""

    @property
    def axis_names(self) -> Sequence[str]:
        """The plan's names of the mesh axes."""

    @property
    def replicated(self) -> tuple[Placement, ...]:
        """Replicate on every axis of the mesh."""

    def attention_methods(self) -> tuple[str | None, ...]:
        """The method by which the running module attends along each mesh axis that shards the sequence, or None:
        ``"all_gather"``, ``"ring"`` or ``"ulysses"``."""

    def plan_error(self, problem: str) -> Exception:
        """The exception to raise when the plan asks an op for something that cannot be done."""
