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


class ContentMismatchError(CheckpointError):
    """A checkpoint has other tensors, shapes or values beside than what it is loaded into."""

    code = "VS0908"


class HfExportError(CheckpointError):
    """A model cannot be written as safetensors."""

    code = "VS0914"


class SaveFailedError(CheckpointError):
    """A save did not succeed. The steps that were complete before are still there."""

    code = "VS0914"


class FolderInUseError(CheckpointError):
    """Another job saves to the same folder."""

    code = "VS0914"


class ConvertError(CheckpointError):
    """`vescale ckpt convert` cannot write its target."""

    code = "VS0900"


class ManifestError(Coded, ValueError):
    """A manifest is damaged, or ranks hold what cannot be one checkpoint."""

    code = "VS0904"


class UnsavableError(CheckpointError):
    """A tensor or a value cannot be saved."""

    code = "VS0914"
