"""What a plan needs, before a job starts: memory of every rank by category, and seconds of a step."""

from vescale.estimation._bucket_gradients import bucket_shares
from vescale.estimation._calibrate import calibrate, on_processors, references
from vescale.estimation._compare import Comparison, EstimateWarning, compare
from vescale.estimation._devices import HOST_KINDS, Curve, Device, Efficiency, device_names, device_of
from vescale.estimation._estimate import Estimate, attention_of_gpu, estimate, make_optimizer, routing_of
from vescale.estimation._html import page
from vescale.estimation._memory_log import Block, Instant, MemoryLog, OpCosts
from vescale.estimation._memory_timeline import MemoryTimeline, timeline_of
from vescale.estimation._prediction import Collective, Prediction, forward_reports, predict
from vescale.estimation._rank_states import RankMemory
from vescale.estimation._rehearsal import (
    Rehearsal,
    balanced_tokens,
    classify,
    is_of_parameters,
    names_block,
    rehearse,
    without_collections,
)
from vescale.estimation._skeleton import first_and_last_of, loss_of, make_batch, skeleton_of
from vescale.estimation._stages import step_of_stages
from vescale.estimation._step_time import (
    OpSeconds,
    StepTime,
    host_seconds,
    op_seconds,
    record_seconds,
)
from vescale.estimation._unfilled import Routing, UnfilledTensors
from vescale.estimation._variants import batch_axes, hybrid_plan, unit_paths, what_if, zero_plan, zero_table, zero_units
from vescale.ir import Repeats, repeats_of

__all__ = [
    "Comparison",
    "Device",
    "Efficiency",
    "Estimate",
    "EstimateWarning",
    "Prediction",
    "RankMemory",
    "StepTime",
    "calibrate",
    "device_names",
    "estimate",
    "page",
    "predict",
    "zero_table",
]
