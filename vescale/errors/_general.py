"""Errors that any part of the library raises."""

from __future__ import annotations

from vescale.errors._coded import Coded


class ArgumentTypeError(Coded, TypeError):
    """An argument has a type that the function does not take."""

    code = "VS0001"


class MissingPackageError(Coded, ImportError):
    """A function needs a package that is not installed."""

    code = "VS0001"


class ArgumentError(Coded, ValueError):
    """An argument, an option or an environment variable has a value that is not possible."""

    code = "VS0001"
