"""Our placements in files: what ``torch.load(weights_only=True)`` may rebuild."""

from __future__ import annotations

from typing import Any

import torch

from vescale.compat import note
from vescale.placements._flattened import FlattenedShard
from vescale.placements._interleaved import InterleavedShard
from vescale.placements._ragged import RaggedShard, StridedRaggedShard, rebuild_strided

__all__ = ["allow_safe_load"]


def allow_safe_load() -> None:
    """Let ``torch.load(weights_only=True)`` build our placements, as PyTorch does for its own; nothing else changes.

    Called on import, so that a process that has made no placement yet can load one. Each constructor validates its
    arguments, whatever a file contains.
    """
    ours: list[Any] = [RaggedShard, StridedRaggedShard, InterleavedShard, FlattenedShard, rebuild_strided]
    note("placements._serialization:torch", *ours)
    torch.serialization.add_safe_globals(ours)
