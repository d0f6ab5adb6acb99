"""Refuses to capture a step whose numbers the host computes: replays of the graph would repeat those of the first."""

from __future__ import annotations

from vescale.compat.devices import is_capturing
from vescale.errors import OptimizerError


def check_no_capture(what: str, fix: str) -> None:
    """Raises ValueError while the current stream is captured. ``what`` the host computes, and the edit."""
    if is_capturing():
        raise OptimizerError(
            f"a step is being captured in a graph, but the host computes {what}: every replay would repeat it; {fix}"
        )
