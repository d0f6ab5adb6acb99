"""Plans: how each tensor of a model is placed on a mesh, as data, in Python or YAML."""

from vescale.plans._entries import (
    AnnotateEntry,
    AxisPlacements,
    Entry,
    FactoryEntry,
    LocalEntry,
    RedistributeEntry,
    ShardEntry,
    UnitEntry,
)
from vescale.plans._errors import MissingMeshError, PlanError, PlanMismatchError, Source, did_you_mean
from vescale.plans._hf_import import HfImportWarning
from vescale.plans._mesh_axes import MeshAxes
from vescale.plans._path import Path, Target
from vescale.plans._phase import ALL, BWD, FWD, INIT, RUN, Phase, phase_text
from vescale.plans._placement_text import parse_placement, placement_text
from vescale.plans._plan import Plan, VescalePlan

__all__ = [
    "ALL",
    "BWD",
    "FWD",
    "INIT",
    "RUN",
    "AnnotateEntry",
    "AxisPlacements",
    "Entry",
    "FactoryEntry",
    "HfImportWarning",
    "LocalEntry",
    "MeshAxes",
    "MissingMeshError",
    "Path",
    "Phase",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "RedistributeEntry",
    "ShardEntry",
    "Source",
    "Target",
    "UnitEntry",
    "VescalePlan",
    "did_you_mean",
    "parse_placement",
    "phase_text",
    "placement_text",
]
