"""The error of everything that is wrong with a checkpoint or with what it is loaded into, and the warning."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = ["CheckpointError", "CheckpointWarning"]


class CheckpointError(Coded, RuntimeError):
    """A checkpoint cannot be written or read; the message names file or tensor, what was expected, and the edit."""

    code = "VS0900"


class CheckpointWarning(Coded, UserWarning):
    """A checkpoint was passed by, or something of it is not as the user may think."""

    code = "VS0919"
