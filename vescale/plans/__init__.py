"""Plans: how each tensor of a model is placed on a mesh, as data, in Python or YAML."""

from vescale.errors import MissingMeshError, PlanError, PlanMismatchError, Source, did_you_mean
from vescale.plans._checkpoint_policy import CheckpointPolicy, checkpoint_budget, checkpoint_policy, split_selector
from vescale.plans._entries import (
    ATTENTION_METHODS,
    AnnotateEntry,
    AttentionEntry,
    AttentionMethod,
    AxisPlacements,
    CheckpointEntry,
    Entry,
    FactoryEntry,
    LocalEntry,
    PrecisionEntry,
    RedistributeEntry,
    ShardEntry,
    UnitEntry,
)
from vescale.plans._hf_import import BATCHED_INPUTS, HfImportWarning
from vescale.plans._hf_paths import expressions, merged_paths, wildcard
from vescale.plans._mesh_axes import MeshAxes, axis_sizes
from vescale.plans._model_config import config_value
from vescale.plans._path import Path, Target
from vescale.plans._phase import ALL, BWD, FWD, INIT, RUN, Phase, phase_text
from vescale.plans._pipeline_entry import PIPELINE_SCHEDULES, PipelineEntry, with_pipeline
from vescale.plans._placement_text import parse_placement, placement_text
from vescale.plans._plan import Plan, VescalePlan
from vescale.plans._unit_policies import dtype_name, float_dtype_of, mp_options, mp_policy_of
from vescale.plans._yaml_nodes import Document, YamlLimits, load_yaml
from vescale.plans._yaml_writer import plan_text

__all__ = [
    "ALL",
    "ATTENTION_METHODS",
    "BATCHED_INPUTS",
    "BWD",
    "FWD",
    "INIT",
    "PIPELINE_SCHEDULES",
    "RUN",
    "AnnotateEntry",
    "AttentionEntry",
    "AttentionMethod",
    "AxisPlacements",
    "CheckpointEntry",
    "CheckpointPolicy",
    "Document",
    "Entry",
    "FactoryEntry",
    "HfImportWarning",
    "LocalEntry",
    "MeshAxes",
    "MissingMeshError",
    "Path",
    "Phase",
    "PipelineEntry",
    "Plan",
    "PlanError",
    "PlanMismatchError",
    "PrecisionEntry",
    "RedistributeEntry",
    "ShardEntry",
    "Source",
    "Target",
    "UnitEntry",
    "VescalePlan",
    "YamlLimits",
    "axis_sizes",
    "checkpoint_budget",
    "checkpoint_policy",
    "config_value",
    "did_you_mean",
    "dtype_name",
    "expressions",
    "float_dtype_of",
    "load_yaml",
    "merged_paths",
    "mp_options",
    "mp_policy_of",
    "parse_placement",
    "phase_text",
    "placement_text",
    "plan_text",
    "split_selector",
    "wildcard",
    "with_pipeline",
]
