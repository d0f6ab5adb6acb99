"""The gradient engine: gradients are complete, and placed as their parameters, when ``backward()`` returns.

:class:`GradientReducer` is for whole models. :class:`ShardedGradients` is what ``fully_shard`` and units of a plan are built
on: gradients that are reduced where their parameters were gathered, and end sharded.
"""

from vescale.gradients._agreed_parameters import GradientMismatchError
from vescale.gradients._arrival_hooks import StepHooks
from vescale.gradients._bucket import Bucket
from vescale.gradients._collective_order import FLAGS_REQUESTER, CollectiveOrder, OrderedUnit, next_unit_number
from vescale.gradients._comm_hook import CommHook, GradientBucket
from vescale.gradients._complete_gradient import local_part
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._hooked_parameters import refuse_reducers_of
from vescale.gradients._one_backward import OneBackward
from vescale.gradients._order_mismatch import OrderMismatchError
from vescale.gradients._parameter import GradientRule, LocalContribution
from vescale.gradients._pending import reduce_pending
from vescale.gradients._pipeline_shares import (
    OtherStages,
    StageShare,
    other_stages,
    pipeline_groups,
    set_other_stages,
    set_shares,
    shares_of,
    shares_of_gradients,
)
from vescale.gradients._reducer import BackwardTracker, GradientReducer
from vescale.gradients._sharded_reduction import (
    ReductionOptions,
    ShardedGradients,
    ShardedReduction,
    reduce_unused,
)
from vescale.gradients._unreduced_gradients import GradientPlace, UnreducedGradients

__all__ = [
    "FLAGS_REQUESTER",
    "BackwardTracker",
    "Bucket",
    "CollectiveOrder",
    "CommHook",
    "DataParallelAxes",
    "GradientBucket",
    "GradientMismatchError",
    "GradientPlace",
    "GradientReducer",
    "GradientRule",
    "LocalContribution",
    "OneBackward",
    "OrderMismatchError",
    "OrderedUnit",
    "OtherStages",
    "ReductionOptions",
    "ShardedGradients",
    "ShardedReduction",
    "StageShare",
    "StepHooks",
    "UnreducedGradients",
    "local_part",
    "next_unit_number",
    "other_stages",
    "pipeline_groups",
    "reduce_pending",
    "reduce_unused",
    "refuse_reducers_of",
    "set_other_stages",
    "set_shares",
    "shares_of",
    "shares_of_gradients",
]
