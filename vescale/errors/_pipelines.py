"""Errors of pipelines."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plan_error import PlanError

__all__ = [
    "PipelineBatchError",
    "PipelineCallError",
    "PipelineCutError",
    "PipelineLossError",
    "PipelineRowsError",
    "PipelineTraceError",
    "PipelineWarning",
    "ScheduleError",
]


class PipelineCutError(PlanError):
    """The model cannot be cut into stages where the plan says."""

    code = "VS1001"


class PipelineBatchError(PlanError):
    """A batch cannot be cut into micro-batches."""

    code = "VS1002"


class PipelineLossError(PlanError):
    """The loss of a pipeline is not found, or how micro-batches add up is not known."""

    code = "VS1003"


class ScheduleError(PlanError):
    """A schedule does not fit the number of stages, ranks or micro-batches, or would wait forever."""

    code = "VS1004"


class PipelineTraceError(PlanError):
    """The forward of the model cannot be run in stages: modules run in another order than they are defined, or values jump
    over a stage."""

    code = "VS1005"


class PipelineCallError(Coded, RuntimeError):
    """A model in stages was called like a whole one, or its micro-batches differ in what stages send."""

    code = "VS1006"


class PipelineWarning(Coded, UserWarning):
    """A forward computes something of the rows of its batch together, which in a pipeline are those of a micro-batch."""

    code = "VS1007"


class PipelineRowsError(PlanError):
    """A forward computes something across the rows of its batch, of which each micro-batch has a part."""

    code = "VS1008"
