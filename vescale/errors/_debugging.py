"""Errors of `vescale.debug`."""

from __future__ import annotations

from vescale.errors._coded import Coded

__all__ = [
    "DebugOptionError",
    "ModelFlopsError",
    "VerifyError",
]


class DebugOptionError(Coded, ValueError, RuntimeError):
    """A tool of `vescale.debug` has an argument that cannot be used, or is on already."""

    code = "VS1403"


class ModelFlopsError(Coded, ValueError):
    """The operations for a token do not follow from the model's parameters."""

    code = "VS1405"


class VerifyError(Coded, ValueError, TypeError):
    """`verify` cannot train the model on meshes with what it was given."""

    code = "VS1406"
