"""The plan's intermediate representation: instructions, programs, and lowering."""

from vescale.ir._expert_sharding import stand_in_for_experts
from vescale.ir._findings import Finding, LoweringError, Repeats, merge_repeats, name_list, repeats_of
from vescale.ir._followed_forward import FlowMode
from vescale.ir._forward_state import (
    ATTRIBUTES,
    ForwardState,
    Kind,
    KnownState,
    WatchedForward,
    is_same,
    state_unchanged,
)
from vescale.ir._lower import check, lower
from vescale.ir._model_copy import copy_model, dtype_of_input, example_inputs, hf_inputs, random_inputs, skeleton_of
from vescale.ir._new_plan import NewPlan, coverage, new_plan
from vescale.ir._packed_weights import packed_dims
from vescale.ir._placement_checks import refuse_part_of_replicas, uneven_cuts, uneven_inputs
from vescale.ir._program import (
    Annotate,
    Attention,
    Checkpoint,
    Factory,
    Hook,
    Instruction,
    Local,
    Op,
    Place,
    Precision,
    Program,
    Redistribute,
    Unit,
    Wrap,
)
from vescale.ir._units import (
    PartialGradient,
    PredictedBucket,
    UnitBucket,
    join_placements,
    predict_buckets,
    ragged_positions,
    unit_buckets,
)

__all__ = ["Finding", "LoweringError", "Program", "check", "coverage", "example_inputs", "lower", "new_plan"]
