"""The version of the package, from which its metadata takes it."""

__version__ = "0.1.0"
