"""Reduction of parameters' gradients, so that they are complete and placed as the plan says when ``backward()`` returns."""

from vescale.gradients._agreement import GradientMismatchError
from vescale.gradients._bucket import Bucket
from vescale.gradients._comm_hook import CommHook, GradientBucket
from vescale.gradients._hooked_parameters import refuse_reducers_of
from vescale.gradients._parameter import GradientRule
from vescale.gradients._pending import reduce_pending
from vescale.gradients._reducer import GradientReducer

__all__ = [
    "Bucket",
    "CommHook",
    "GradientBucket",
    "GradientMismatchError",
    "GradientReducer",
    "GradientRule",
    "reduce_pending",
    "refuse_reducers_of",
]
