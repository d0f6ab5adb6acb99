"""Plans: how each tensor of a model is placed on a mesh, as data, in Python or YAML."""

from vescale.errors import MissingMeshError, PlanError, PlanMismatchError, Source, did_you_mean
from vescale.plans._entries import (
    ALL,
    ATTENTION_METHODS,
    BWD,
    FWD,
    INIT,
    RUN,
    AnnotateEntry,
    AttentionEntry,
    AttentionMethod,
    AxisPlacements,
    CheckpointEntry,
    CheckpointPolicy,
    Entry,
    FactoryEntry,
    LocalEntry,
    Path,
    Phase,
    PrecisionEntry,
    RedistributeEntry,
    ShardEntry,
    Target,
    UnitEntry,
    checkpoint_budget,
    checkpoint_policy,
    dtype_name,
    float_dtype_of,
    mp_options,
    mp_policy_of,
    phase_text,
    split_selector,
)
from vescale.plans._hf_import import BATCHED_INPUTS, HfImportWarning, config_value, expressions, merged_paths, wildcard
from vescale.plans._mesh_axes import MeshAxes, axis_sizes
from vescale.plans._placement_text import parse_placement, placement_text
from vescale.plans._plan import Plan
from vescale.plans._plan_entries import PIPELINE_SCHEDULES, PipelineEntry, with_pipeline
from vescale.plans._yaml_writer import plan_text

__all__ = [
    "ALL",
    "ATTENTION_METHODS",
    "BWD",
    "FWD",
    "INIT",
    "PIPELINE_SCHEDULES",
    "RUN",
    "HfImportWarning",
    "MissingMeshError",
    "Phase",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "parse_placement",
    "placement_text",
]
