"""Gradients of parameters: complete, and placed as the plan says, when ``backward()`` returns."""

from vescale.runtime._gradients._bucket import Bucket
from vescale.runtime._gradients._captured import complete_captured
from vescale.runtime._gradients._comm_hook import CommHook, GradientBucket
from vescale.runtime._gradients._entry import GradientRule
from vescale.runtime._gradients._reducer import GradientReducer
from vescale.runtime._gradients._schedule import GradientMismatchError

__all__ = [
    "Bucket",
    "CommHook",
    "GradientBucket",
    "GradientMismatchError",
    "GradientReducer",
    "GradientRule",
    "complete_captured",
]
