"""``Resolution``: what a plan says of one model."""

from __future__ import annotations

from vescale.ir._model_index import ModelIndex
from vescale.ir._planned_placements import PlannedAxes, PlannedBoundary, PlannedState
from vescale.plans import (
    AttentionEntry,
    AttentionMethod,
    CheckpointEntry,
    LocalEntry,
    PrecisionEntry,
    ShardEntry,
    UnitEntry,
)

__all__ = ["Boundary", "Resolution"]

# (module, "<in>" or "<out>", index)
Boundary = tuple[str, str, int | str | None]


class Resolution:
    """What a plan says of one model.

    Attributes:
        states: first name of each parameter and buffer -> its planned placements (empty if there are none).
        boundaries: those of inputs and outputs; the ones of a single input include those of all inputs of the module.
        given: inputs of the model -> the entry that says whether the caller passes local parts.
        factories: module -> placements of tensors that its forward makes.
        attention: module -> axis -> how attention works along it, and the entry that says so.
        locals: module -> the entry that runs it on local tensors.
        units: module -> the entry that groups its parameters.
        precisions: module -> the entry that gives its dtypes.
        checkpoints: module -> the entry that says what its forward saves.
        matches: ``id`` of an entry -> what it matched, as names of parameters, buffers, modules, inputs and outputs.
    """

    def __init__(self, index: ModelIndex) -> None:
        self.states = {name: PlannedState() for name in index.states}
        self.boundaries: dict[Boundary, PlannedBoundary] = {}
        self.given: dict[Boundary, ShardEntry] = {}
        self.factories: dict[str, PlannedAxes] = {}
        self.attention: dict[str, dict[str, tuple[AttentionMethod, AttentionEntry]]] = {}
        self.locals: dict[str, LocalEntry] = {}
        self.units: dict[str, UnitEntry] = {}
        self.precisions: dict[str, PrecisionEntry] = {}
        self.checkpoints: dict[str, CheckpointEntry] = {}
        self.matches: dict[int, tuple[str, ...]] = {}
