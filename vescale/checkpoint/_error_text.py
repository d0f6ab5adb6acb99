"""Errors of checkpoints as text and back, for other ranks: their class is kept."""

from __future__ import annotations

from vescale.errors import CODES, CheckpointError, SaveFailedError


def as_text(error: BaseException) -> str:
    """Errors of other kinds get the name of their class."""
    code = error.code if isinstance(error, CheckpointError) else SaveFailedError.code
    return code + (str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")


def from_text(text: str, before: str = "") -> CheckpointError:
    """The inverse of :func:`as_text`; ``before`` is put in front of the message."""
    code, message = text[:6], text[6:]
    kind = CODES.get(code, CheckpointError)
    assert issubclass(kind, CheckpointError)
    return kind(before + message.removesuffix(f" [{code}]"))
