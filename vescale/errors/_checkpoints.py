"""Errors of checkpoints."""

from __future__ import annotations

from vescale.errors._coded import Coded

# The error of everything that is wrong with a checkpoint or with what it is loaded into, and the warning.


class CheckpointError(Coded, RuntimeError):
    """A checkpoint cannot be written or read; the message names file or tensor, what was expected, and the edit."""

    code = "VS0900"


class CheckpointWarning(Coded, UserWarning):
    """A checkpoint was passed by, or something of it is not as the user may think."""

    code = "VS0900"


class CheckpointOptionError(Coded, ValueError):
    """An argument of `Checkpointer` or of a save has a value that cannot be used."""

    code = "VS0001"


class NoSuchStepError(CheckpointError):
    """A folder has no such step, or no complete one."""

    code = "VS0900"


class DamagedFileError(CheckpointError):
    """A file of a checkpoint is truncated, damaged, or describes its contents wrongly."""

    code = "VS0904"


class UnsafePickleError(CheckpointError):
    """A pickle names something that a checkpoint may not hold. Nothing of it was run."""

    code = "VS0904"


class UnknownFormatError(CheckpointError):
    """A path is not a checkpoint in a format that can be read."""

    code = "VS0904"


class SafetensorsFolderError(CheckpointError):
    """A folder of safetensors lacks a file, or its index does not fit its files."""

    code = "VS0904"


class ContentMismatchError(CheckpointError):
    """A checkpoint has other tensors, shapes or values beside than what it is loaded into."""

    code = "VS0908"


class UnsavableTensorError(CheckpointError):
    """A tensor has no values that a checkpoint can hold: it is on the meta device, a pending sum, sparse, or a subclass."""

    code = "VS0914"


class HfLoadError(CheckpointError):
    """`load_hf` cannot fill the model from this folder."""

    code = "VS0908"


class HfConversionError(CheckpointError):
    """The conversion between the names of transformers' files and the model's parameters failed."""

    code = "VS0908"


class HfExportError(CheckpointError):
    """A model cannot be written as safetensors."""

    code = "VS0914"


class UnsavableValueError(CheckpointError):
    """A value beside model and optimizer is neither a tensor nor plain data."""

    code = "VS0914"


class SaveFailedError(CheckpointError):
    """A save did not succeed. The steps that were complete before are still there."""

    code = "VS0914"


class FolderInUseError(CheckpointError):
    """Another job saves to the same folder."""

    code = "VS0914"


class OptimizerNamesError(CheckpointError):
    """The states of an optimizer cannot be named after the model's parameters."""

    code = "VS0908"


class ConvertError(CheckpointError):
    """`vescale ckpt convert` cannot write its target."""

    code = "VS0900"


class UnknownDtypeError(CheckpointError):
    """A checkpoint names a dtype that the installed torch does not know."""

    code = "VS0904"


class ManifestError(Coded, ValueError):
    """A manifest is damaged, or ranks hold what cannot be one checkpoint."""

    code = "VS0904"
