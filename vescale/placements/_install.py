"""Puts the DTensor extensions in place."""

__all__ = ["install"]


def install() -> None:
    """Idempotent."""
