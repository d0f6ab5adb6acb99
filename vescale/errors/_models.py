"""Errors of models that meet a plan: lowering, parallelize, and what is called on a parallelized model."""

from __future__ import annotations

from vescale.errors._coded import Coded
from vescale.errors._plans import PlanError


class ParallelizeError(PlanError):
    """`parallelize` cannot be called like this: the model is parallelized already, the mesh is not the plan's, or the mode
    does not exist."""

    code = "VS0204"


class NotParallelizedError(Coded, KeyError):
    """A function was given a model that has not been parallelized."""

    code = "VS0204"


class MissingValuesError(PlanError):
    """Parameters or buffers are on the meta device, or got memory by `to_empty()`, and nothing has given them values."""

    code = "VS0207"


class ForeignToolError(PlanError):
    """Another library's tool was used on a parallelized model, and would give wrong numbers."""

    code = "VS0209"


class NotPicklableError(Coded, TypeError):
    """A parallelized model was pickled, as `torch.save(model)` does."""

    code = "VS0209"


class RankFailedError(Coded, RuntimeError):
    """The rank that does the work for all has failed."""

    code = "VS0212"


class BoundaryError(PlanError):
    """A tensor at a module's boundary does not have the shape, placement or memory that the plan's entry needs."""

    code = "VS0200"


class UnitSubclassError(Coded, NotImplementedError):
    """A unit of a plan holds a parameter that is a tensor subclass."""

    code = "VS0200"


class NoGraphError(Coded, RuntimeError):
    """`report` found no graph of a forward."""

    code = "VS0204"


class ProgramTextError(Coded, ValueError):
    """A text is not a program that `Program.to_json()` has written, or one of another version."""

    code = "VS0120"


class StrayParameterError(PlanError):
    """A plain parameter came into the model after `parallelize` or `fully_shard`: nothing reduces its gradient."""

    code = "VS0223"


class TransformError(Coded, NotImplementedError):
    """A transform of `torch.func`, or forward-mode differentiation, reaches what has no rule for it: the boundaries of a
    parallelized model, or a module that `fully_shard` gathers."""

    code = "VS0209"


class RestartedStoreError(Coded, RuntimeError):
    """torchrun has restarted the ranks with the store of the attempt before, in which they would wait for processes that
    are gone."""

    code = "VS0212"


class RecomputationError(Coded, RuntimeError):
    """What a checkpointed module has read in its forward is not there when it runs again in backward: an input was written
    to in place, or a tensor of which nobody knew that the module writes to it."""

    code = "VS0222"


class SlowPathError(PlanError):
    """A path takes too long to match the names of the model."""

    code = "VS0101"


# Errors of static mode.


class StaticRecordError(PlanError):
    """What a model in static mode runs was asked for before a step was recorded."""

    code = "VS1101"


class StaticStepError(Coded, RuntimeError):
    """A step in static mode met what was not recorded where it cannot be repeated: after a write to a large tensor or to a
    parameter, in a recomputation, or because it keeps a tensor."""

    code = "VS1101"


class StaticHelpersError(PlanError):
    """Static mode was asked for where its C++ helpers are missing or switched off."""

    code = "VS1104"


class StaticModeWarning(Coded, UserWarning):
    """A model in static mode has run its first steps in eager mode."""

    code = "VS1101"


# Errors of pipelines.


class PipelineCutError(PlanError):
    """The model cannot be cut into stages where the plan says."""

    code = "VS1001"


class PipelineBatchError(PlanError):
    """A batch cannot be cut into micro-batches."""

    code = "VS1006"


class PipelineLossError(PlanError):
    """The loss of a pipeline is not found, or how micro-batches add up is not known."""

    code = "VS1001"


class ScheduleError(PlanError):
    """A schedule does not fit the number of stages, ranks or micro-batches, or would wait forever."""

    code = "VS1001"


class PipelineTraceError(PlanError):
    """The forward of the model cannot be run in stages: modules run in another order than they are defined, or values jump
    over a stage."""

    code = "VS1001"


class PipelineCallError(Coded, RuntimeError):
    """A model in stages was called like a whole one, or its micro-batches differ in what stages send."""

    code = "VS1006"


class PipelineWarning(Coded, UserWarning):
    """A forward computes something of the rows of its batch together, which in a pipeline are those of a micro-batch."""

    code = "VS1008"


class PipelineRowsError(PlanError):
    """A forward computes something across the rows of its batch, of which each micro-batch has a part."""

    code = "VS1008"


class RepeatedPartsWarning(Coded, UserWarning):
    """Ranks that give different parts of a batch (`given="local"`) gave the same values in all of the first forwards."""

    code = "VS0302"


class DerivedPlanError(PlanError):
    """A plan cannot be derived from this model: by name, from its own `tp_plan`, or from a forward."""

    code = "VS0130"
