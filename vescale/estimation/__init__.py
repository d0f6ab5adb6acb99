"""What a plan needs, before a job starts: memory of every rank by category, and seconds of a step."""

from vescale.estimation._calibrate import calibrate
from vescale.estimation._compare import Comparison, EstimateWarning, compare
from vescale.estimation._depth import Repeats, repeats_of
from vescale.estimation._devices import Device, Efficiency, device_names, device_of
from vescale.estimation._estimate import Estimate, RankMemory, estimate
from vescale.estimation._html import page
from vescale.estimation._implicit import implicit_reports
from vescale.estimation._memory_log import Instant, MemoryLog
from vescale.estimation._memory_timeline import CATEGORIES, timeline_of
from vescale.estimation._optimizers import OPTIMIZERS
from vescale.estimation._received_tokens import balanced_tokens
from vescale.estimation._rehearsal import Rehearsal, classify
from vescale.estimation._step_time import StepTime
from vescale.estimation._unfilled import UnfilledTensors
from vescale.estimation._unknown_values import Routing
from vescale.estimation._variants import WHAT_IF, what_if, zero_plan, zero_table

__all__ = [
    "CATEGORIES",
    "OPTIMIZERS",
    "WHAT_IF",
    "Comparison",
    "Device",
    "Efficiency",
    "Estimate",
    "EstimateWarning",
    "Instant",
    "MemoryLog",
    "RankMemory",
    "Rehearsal",
    "Repeats",
    "Routing",
    "StepTime",
    "UnfilledTensors",
    "balanced_tokens",
    "calibrate",
    "classify",
    "compare",
    "device_names",
    "device_of",
    "estimate",
    "implicit_reports",
    "page",
    "repeats_of",
    "timeline_of",
    "what_if",
    "zero_plan",
    "zero_table",
]
