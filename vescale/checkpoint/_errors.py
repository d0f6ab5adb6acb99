"""The error of everything that is wrong with a checkpoint or with what it is loaded into, and the warning."""

__all__ = ["CheckpointError", "CheckpointWarning"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names file or tensor, what was expected, and the edit."""


class CheckpointWarning(UserWarning):
    """A checkpoint was passed by, or something of it is not as the user may think."""
