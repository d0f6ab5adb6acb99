"""The error of everything that is wrong with a checkpoint or with what it is loaded into."""

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names file or tensor, what was expected, and the edit."""
