"""Errors of checkpoints as text and back, for other ranks: their class is kept."""

from __future__ import annotations

from vescale.errors import CheckpointError, SaveFailedError


def as_text(error: BaseException) -> str:
    """Errors of other kinds get the name of their class."""
    if isinstance(error, CheckpointError):
        return f"{type(error).__name__}:{error}"
    return f"{SaveFailedError.__name__}:{type(error).__name__}: {error}"


def from_text(text: str, before: str = "") -> CheckpointError:
    """The inverse of :func:`as_text`; ``before`` is put in front of the message."""
    name, _, message = text.partition(":")
    kind = _classes().get(name, CheckpointError)
    return kind(before + message.removesuffix(f" [{kind.code}]"))


def _classes() -> dict[str, type[CheckpointError]]:
    found = [CheckpointError]
    for kind in found:
        found += kind.__subclasses__()
    return {kind.__name__: kind for kind in found}
