"""The errors of vescale: each kind of mistake has a stable code, which messages end with and docs/errors.md explains."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vescale.errors._kinds import KINDS

CODES: dict[str, list[type[Coded]]] = {}
"""Code -> the classes of this kind that have been imported."""

_CODE_AT_END = re.compile(r"\[VS\d{4}\]$")


class Coded:
    """A base of exceptions and warnings whose text ends with ``[code]``.

    Attributes:
        code: ``VS`` and four digits, of the kind of the mistake (``KINDS``); docs/errors.md has a section for it. Each
            class gives its own, ``class NameError(Coded, ValueError, code="VS0001")``, or has that of its base.

    A message that quotes another error keeps that error's code if it stands at the end: it says more.
    """

    code: ClassVar[str]

    def __init_subclass__(cls, *, code: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if code is not None:
            assert code in KINDS, f"{cls.__name__}.code is {code!r}"
            cls.code = code
            CODES.setdefault(code, []).append(cls)

    def __str__(self) -> str:
        own: Any = self
        # KeyError quotes its argument, as a key.
        text = str(own.args[0]) if isinstance(self, KeyError) and len(own.args) == 1 else super().__str__()
        return text if _CODE_AT_END.search(text) else f"{text} [{self.code}]"


# The type of a value, as messages name it.


def kind_of(value: Any) -> str:
    """``a Linear``, ``an int``."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


# The known name that a wrong one is close to.


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for a near miss, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Where an entry of a plan was written.

_PACKAGE = str(Path(__file__).parent.parent)


@dataclass(frozen=True)
class Source:
    """Where an entry was written: a line of Python, or a line and column of YAML (counted from 1)."""

    file: str
    line: int
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f":{self.column}" if self.column is not None else "")


def calling_line() -> Source:
    """The nearest line outside this library on the call stack: the user's ``plan.shard(...)``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return Source(frame.f_code.co_filename, frame.f_lineno)


# Any part of the library.


class ArgumentTypeError(Coded, TypeError, code="VS0001"):
    """An argument has a type that the function does not take."""


class MissingPackageError(Coded, ImportError, code="VS0001"):
    """A function needs a package that is not installed."""


class ArgumentError(Coded, ValueError, code="VS0001"):
    """An argument, an option or an environment variable has a value that is not possible."""


# Plans: what is written in Python or YAML, before a model is looked at.


class PlanError(Coded, ValueError, code="VS0100"):
    """An invalid plan: what was found, what was expected, and the edit that fixes it, with its source.

    ``source`` is the position of the mistake, if known; ``problem`` is the message without it.
    """

    def __init__(self, problem: str, source: Source | None = None) -> None:
        super().__init__(f"{source}: {problem}" if source is not None else problem)
        self.problem = problem
        self.source = source


class MissingMeshError(PlanError, code="VS0120"):
    """A plan file without sizes of its axes was read without a mesh."""


class PlanMismatchError(PlanError, code="VS0201"):
    """Ranks are about to run different things; the same error on every rank, before any collective.

    ``ranks``: the global ranks that differ from the majority, or have not come.
    """

    def __init__(self, problem: str, ranks: Iterable[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class PathError(Coded, ValueError, code="VS0101"):
    """The path of an entry cannot be read: it is empty, no regular expression, or uses what paths do not have."""


class EntryError(PlanError, code="VS0100"):
    """An entry of a plan contradicts itself or the mesh: an unknown axis, no placement, arguments that exclude others."""


class YamlPlanError(PlanError, code="VS0120"):
    """A YAML plan has a section, key or value that plans do not have."""


class BufferMismatchError(Coded, ValueError, code="VS0201"):
    """Ranks of one process group have planned different buffers."""


class ShardingMismatchError(PlanMismatchError, BufferMismatchError, code="VS0201"):
    """Ranks have given different parameters, or options, to ``fully_shard``."""


class PlanValueError(Coded, ValueError, code="VS0100"):
    """A mesh, a phase or a policy of a plan has a value that is not possible."""


# Models that meet a plan: lowering, parallelize, and what is called on a parallelized model.


class ParallelizeError(PlanError, code="VS0204"):
    """`parallelize` cannot be called like this: the model is parallelized already, the mesh is not the plan's, or the mode
    does not exist."""


class NotParallelizedError(Coded, KeyError, code="VS0204"):
    """A function was given a model that has not been parallelized."""


class MissingValuesError(PlanError, code="VS0207"):
    """Parameters or buffers are on the meta device, or got memory by `to_empty()`, and nothing has given them values."""


class ForeignToolError(PlanError, code="VS0209"):
    """Another library's tool was used on a parallelized model, and would give wrong numbers."""


class NotPicklableError(Coded, TypeError, code="VS0209"):
    """A parallelized model was pickled, as `torch.save(model)` does."""


class RankFailedError(Coded, RuntimeError, code="VS0212"):
    """The rank that does the work for all has failed."""


class BoundaryError(PlanError, code="VS0200"):
    """A tensor at a module's boundary does not have the shape, placement or memory that the plan's entry needs."""


class UnitSubclassError(Coded, NotImplementedError, code="VS0200"):
    """A unit of a plan holds a parameter that is a tensor subclass."""


class NoGraphError(Coded, RuntimeError, code="VS0204"):
    """`report` found no graph of a forward."""


class ProgramTextError(Coded, ValueError, code="VS0120"):
    """A text is not a program that `Program.to_json()` has written, or one of another version."""


class StrayParameterError(PlanError, code="VS0223"):
    """A plain parameter came into the model after `parallelize` or `fully_shard`: nothing reduces its gradient."""


class TransformError(Coded, NotImplementedError, code="VS0209"):
    """A transform of `torch.func`, or forward-mode differentiation, reaches what has no rule for it: the boundaries of a
    parallelized model, or a module that `fully_shard` gathers."""


class RestartedStoreError(Coded, RuntimeError, code="VS0212"):
    """torchrun has restarted the ranks with the store of the attempt before, in which they would wait for processes that
    are gone."""


class RecomputationError(Coded, RuntimeError, code="VS0222"):
    """What a checkpointed module has read in its forward is not there when it runs again in backward: an input was written
    to in place, or a tensor of which nobody knew that the module writes to it."""


class SlowPathError(PlanError, code="VS0101"):
    """A path takes too long to match the names of the model."""


# Errors of static mode.


class StaticRecordError(PlanError, code="VS1101"):
    """What a model in static mode runs was asked for before a step was recorded."""


class StaticStepError(Coded, RuntimeError, code="VS1101"):
    """A step in static mode met what was not recorded where it cannot be repeated: after a write to a large tensor or to a
    parameter, in a recomputation, or because it keeps a tensor."""


class StaticHelpersError(PlanError, code="VS1104"):
    """Static mode was asked for where its C++ helpers are missing or switched off."""


class StaticModeWarning(Coded, UserWarning, code="VS1101"):
    """A model in static mode has run its first steps in eager mode."""


# Errors of pipelines.


class PipelineCutError(PlanError, code="VS1001"):
    """The model cannot be cut into stages where the plan says."""


class PipelineBatchError(PlanError, code="VS1006"):
    """A batch cannot be cut into micro-batches."""


class PipelineLossError(PlanError, code="VS1001"):
    """The loss of a pipeline is not found, or how micro-batches add up is not known."""


class ScheduleError(PlanError, code="VS1001"):
    """A schedule does not fit the number of stages, ranks or micro-batches, or would wait forever."""


class PipelineTraceError(PlanError, code="VS1001"):
    """The forward of the model cannot be run in stages: modules run in another order than they are defined, or values jump
    over a stage."""


class PipelineCallError(Coded, RuntimeError, code="VS1006"):
    """A model in stages was called like a whole one, or its micro-batches differ in what stages send."""


class PipelineWarning(Coded, UserWarning, code="VS1008"):
    """A forward computes something of the rows of its batch together, which in a pipeline are those of a micro-batch."""


class PipelineRowsError(PlanError, code="VS1008"):
    """A forward computes something across the rows of its batch, of which each micro-batch has a part."""


class RepeatedPartsWarning(Coded, UserWarning, code="VS0302"):
    """Ranks that give different parts of a batch (`given="local"`) gave the same values in all of the first forwards."""


class DerivedPlanError(PlanError, code="VS0130"):
    """A plan cannot be derived from this model: by name, from its own `tp_plan`, or from a forward."""


# Errors of `fully_shard`.


class FullyShardError(Coded, ValueError, code="VS0603"):
    """`fully_shard` was given modules or arguments that it cannot shard: an empty list, a module twice, tied parameters in
    two groups, a placement that does not fit."""


class UnsupportedParameterError(Coded, NotImplementedError, code="VS0603"):
    """A parameter is of a kind that `fully_shard` cannot gather, or has no shape yet."""


class GatherHookError(Coded, ValueError, RuntimeError, code="VS0603"):
    """`fsdp_pre_all_gather` or `fsdp_post_all_gather` of a tensor subclass returned something else than expected, or than
    before."""


class UnsupportedSettingError(Coded, NotImplementedError, code="VS0603"):
    """A setting of FSDP2 that this engine does not have."""


# Errors of gradients and their reduction.


class GradientReducerError(Coded, ValueError, code="VS0703"):
    """A `GradientReducer` or the data-parallel axes of a mesh cannot be used as given."""


class SparseGradientError(Coded, NotImplementedError, code="VS0703"):
    """A sparse gradient reached `fully_shard`, which reduces dense ones."""


class GradientError(Coded, ValueError, RuntimeError, code="VS0703"):
    """A gradient cannot be reduced: it is sparse, came twice in one backward, was changed meanwhile, or would lose its
    imaginary part."""


# Errors of flat buffers and their layouts.


class DBufferError(Coded, ValueError, code="VS0502"):
    """An operation on a `DBuffer` does not fit its placements, axes or layout."""


class BufferMemoryError(Coded, RuntimeError, code="VS0502"):
    """The memory of a buffer was used before it was allocated, or reserved after."""


class UnknownTensorError(Coded, KeyError, code="VS0502"):
    """A group of tensors or the shipped shape lists have nothing of that name."""


# Errors of groups, buckets and comparisons between ranks.


class NotInMeshError(Coded, ValueError, code="VS0212"):
    """A rank asked for its group on a mesh that it is not part of."""


# Errors of scripts around a model.


class ParameterHookError(Coded, ValueError, code="VS0223"):
    """A parameter that is going to be replaced has gradient hooks, which would never run."""


class ConsensusError(Coded, RuntimeError, code="VS0212"):
    """Other ranks did not come to a round in time, or one of them has failed in it.

    Attributes:
        ranks: which ones.
        elsewhere: where ranks wait for each other, so that they do not come.
        failure: of the rank that has failed.
    """

    def __init__(self, problem: str, ranks: Sequence[int], elsewhere: str = "", failure: str = "") -> None:
        super().__init__(problem)
        self.ranks, self.elsewhere, self.failure = tuple(ranks), elsewhere, failure


class LateRanksWarning(Coded, UserWarning, code="VS0212"):
    """Some ranks have come to a round and wait for others."""


class OrderMismatchError(Coded, RuntimeError, code="VS0301"):
    """Ranks have gathered, or reduced, different units in one place of their order, so that the contents were mixed, or wait
    for each other in collectives that do not pair.

    ``ranks``: those that differ from the majority.
    """

    def __init__(self, problem: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class FullyShardStateError(Coded, RuntimeError, code="VS0603"):
    """A module under `fully_shard` was called, written to or freed at a time when it cannot be."""


# Errors of ops on DTensors.


class RuleError(Coded, ValueError, TypeError, code="VS1603"):
    """A rule that was registered for an op is not one, or returned a decision that does not fit the op."""


class UnsupportedOpError(Coded, NotImplementedError, code="VS1604"):
    """An op is not implemented for the placements of its operands: options that need the rows of other ranks, heads cut in
    several runs."""


class OpPlacementError(Coded, RuntimeError, code="VS1604"):
    """An op has no meaning on the placements of its operands: a write to a copy, operands on different meshes."""


class MixedTensorsError(Coded, RuntimeError, code="VS1607"):
    """Plain tensors of the size of this rank's part meet outputs of a model, parameters of `fully_shard` meet plain tensors
    outside of their module's forward, or a DTensor that requires a gradient is written to a plain tensor."""


class IndexBoundsError(Coded, IndexError, code="VS1605"):
    """Indices are out of bounds: tokens that an embedding has no row for, positions for ``gather``, classes for
    ``one_hot``."""


class PendingSumWarning(Coded, UserWarning, code="VS0407"):
    """`to_local()` of a pending sum (`Partial`) of a parallelized model gave this rank's summand, which is not the value."""


# Errors of placements and of conversions between them.


class PlacementError(Coded, ValueError, code="VS0401"):
    """A placement does not fit the tensor or the mesh: a dim that it does not have, units that do not divide, the wrong
    number of placements."""


class OtherMeshError(Coded, NotImplementedError, code="VS0401"):
    """A DTensor was to be redistributed to another mesh."""


class ShardedStateError(Coded, ValueError, code="VS0407"):
    """A state dict of torch.distributed.checkpoint does not fit the DTensor that it is loaded into."""


class DTensorStorageError(Coded, RuntimeError, code="VS0209"):
    """Foreign code asked for the memory of a DTensor, which has none of its own."""


class SavedPartWarning(Coded, UserWarning, code="VS0407"):
    """`torch.save` writes this rank's part of a DTensor."""


# Errors of random numbers, deferred initialization and samplers.


class UnsupportedRandomOpError(Coded, NotImplementedError, code="VS1202"):
    """A random op is unknown, or has no implementation for the tensor or device."""


class RandomOpError(Coded, RuntimeError, code="VS1202"):
    """A random op cannot give the numbers of one device where it is used: a Partial tensor, a fused kernel, or a captured
    graph."""


class UnsupportedDeferredError(Coded, NotImplementedError, code="VS1201"):
    """An op or hook cannot be recorded inside of `deferred_init()`."""


class MaterializeError(Coded, ValueError, RuntimeError, code="VS1201"):
    """Deferred tensors cannot be given values as asked for."""


class GeneratorError(Coded, ValueError, code="VS1202"):
    """A generator or its state is not of the kind that can be continued."""


# Optimizers, clipping and averages.


class MatrixBlocksError(Coded, ValueError, code="VS0804"):
    """`blocks=` or a pattern of `muon_groups` does not fit the parameter."""


class OptimizerReportError(Coded, NotImplementedError, code="VS0802"):
    """`report` cannot plan the states of an optimizer that has not stepped yet."""


class UnevenBlocksError(Coded, ValueError, code="VS0804"):
    """No placement describes where the blocks of a tensor are on a mesh, although none is cut."""


class OptimizerError(Coded, ValueError, RuntimeError, code="VS0802"):
    """An optimizer, clipping or an average gets options, states, parameters or gradients that it cannot take."""


# Checkpoints.


class CheckpointError(Coded, RuntimeError, code="VS0900"):
    """A checkpoint cannot be written or read; the message names file or tensor, what was expected, and the edit."""


class CheckpointWarning(Coded, UserWarning, code="VS0900"):
    """A checkpoint was passed by, or something of it is not as the user may think."""


class NoSuchStepError(CheckpointError, code="VS0900"):
    """A folder has no such step, or no complete one."""


class DamagedFileError(CheckpointError, code="VS0904"):
    """A file of a checkpoint is truncated, damaged, or describes its contents wrongly."""


class UnsafePickleError(CheckpointError, code="VS0904"):
    """A pickle names something that a checkpoint may not hold. Nothing of it was run."""


class UnknownFormatError(CheckpointError, code="VS0904"):
    """A path is not a checkpoint in a format that can be read."""


class ContentMismatchError(CheckpointError, code="VS0908"):
    """A checkpoint has other tensors, shapes or values beside than what it is loaded into."""


class HfExportError(CheckpointError, code="VS0914"):
    """A model cannot be written as safetensors."""


class SaveFailedError(CheckpointError, code="VS0914"):
    """A save did not succeed. The steps that were complete before are still there."""


class FolderInUseError(CheckpointError, code="VS0914"):
    """Another job saves to the same folder."""


class ConvertError(CheckpointError, code="VS0900"):
    """`vescale ckpt convert` cannot write its target."""


class ManifestError(Coded, ValueError, code="VS0904"):
    """A manifest is damaged, or ranks hold what cannot be one checkpoint."""


class UnsavableError(CheckpointError, code="VS0914"):
    """A tensor or a value cannot be saved."""


# Errors of estimates.


class EstimateError(PlanError, code="VS1502"):
    """An estimate cannot be made of this model, plan and batch."""


class SimulationError(Coded, ValueError, RuntimeError, code="VS1502"):
    """A script cannot be simulated as asked for: there is no such file or rank, or the simulation itself ended."""


# Errors of `vescale.debug`.


class DebugOptionError(Coded, ValueError, RuntimeError, code="VS0001"):
    """A tool of `vescale.debug` has an argument that cannot be used, or is on already."""


class VerifyError(Coded, ValueError, TypeError, code="VS1502"):
    """`verify` cannot train the model on meshes with what it was given."""


class ProcessFailed(Coded, RuntimeError, code="VS0212"):
    """A local process raised an exception or died."""


class EstimateOptionError(Coded, ValueError, code="VS1502"):
    """A device table, a variant or an option of an estimate or a search is not possible."""


# The installed PyTorch, and FSDP2's interface.


class CudaError(Coded, RuntimeError, code="VS1701"):
    """The CUDA driver or compiler refused a kernel."""


class PrivateAttributeError(Coded, AttributeError, NotImplementedError, code="VS0209"):
    """A script uses a private attribute of FSDP2 that this engine does not have."""


class SetDataError(Coded, ValueError, code="VS1604"):
    """`parameter.data` of a DTensor was set to data of another shape, or to the memory of another parameter."""


class MissingHelpersWarning(Coded, UserWarning, code="VS1104"):
    """C++ helpers are missing, or were built for another torch: their Python fallbacks take more host time."""


# The versions of torch that vescale is made for, and the error on others.

# Minor releases; README.md says the same, and pyproject.toml has the range.
SUPPORTED_TORCH = ("2.13", "2.14", "2.15")
LIMITED_TORCH = ("2.11", "2.12")
TORCH_RANGE = ">=2.11,<2.16"
_LIMITED_TO = "README's script, the examples, fully_shard, gradients and random numbers; nothing else is tested"

_RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+.*)?")


class UnsupportedTorchError(Coded, ImportError, code="VS1701"):
    """The installed torch is not supported, or lacks something that vescale needs."""


class UntestedTorchWarning(Coded, UserWarning, code="VS1701"):
    """VESCALE_ALLOW_TORCH=1 lets vescale run on a torch that it is not made for."""


def torch_promise(version: str) -> str:
    """What is promised on a version of torch: ``supported``, ``limited: ...`` or ``not supported``, as pre-releases are."""
    release = _RELEASE.fullmatch(version)
    minor = "" if release is None else release[1]
    if minor in SUPPORTED_TORCH:
        return "supported"
    return f"limited: {_LIMITED_TO}" if minor in LIMITED_TORCH else "not supported"


__all__ = sorted(cls.__name__ for classes in CODES.values() for cls in classes)
