"""Warnings: plans that run, and probably not as meant."""

from __future__ import annotations

from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex
from vescale.ir._resolve import Resolution
from vescale.plans import Plan

__all__ = ["lint"]


def lint(plan: Plan, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """Add warnings."""
