"""The gradient engine: gradients are complete, and placed as their parameters, when ``backward()`` returns.

:class:`GradientReducer` is for whole models. :class:`ShardedGradients` is what ``fully_shard`` and units of a plan are built
on: gradients that are reduced where their parameters were gathered, and end sharded.
"""

from vescale.gradients._arrival_hooks import StepHooks
from vescale.gradients._collective_order import FLAGS_REQUESTER, CollectiveOrder, OrderedUnit, next_unit_number
from vescale.gradients._data_parallel_axes import DataParallelAxes
from vescale.gradients._hooked_parameters import ModuleTree, refuse_reducers_of
from vescale.gradients._one_backward import OneBackward
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
