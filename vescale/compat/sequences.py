"""Sequences of unequal lengths: PyTorch writes them to a buffer, which for DTensors would be a plain tensor."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils import rnn

from vescale.compat.patching import Changes


def pad_dtensors(changes: Changes, _: Any) -> None:
    """``pad_sequence`` of DTensors, which ``pack_sequence`` calls: each is padded by itself."""
    original = rnn.pad_sequence

    @functools.wraps(original)
    def pad_sequence(
        sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
    ) -> Any:
        if padding_side not in ("left", "right") or not any(isinstance(x, DTensor) for x in sequences):
            return original(sequences, batch_first, padding_value, padding_side)
        return _padded(list(sequences), 0 if batch_first else 1, padding_value, padding_side == "left")

    changes.function(original, pad_sequence)


def _padded(sequences: Sequence[torch.Tensor], dim: int, value: float, is_left: bool) -> torch.Tensor:
    length = max(len(x) for x in sequences)
    missing = [length - len(x) for x in sequences]
    inner = (0, 0) * (sequences[0].ndim - 1)
    sides = [(*inner, *((size, 0) if is_left else (0, size))) for size in missing]
    return torch.stack([F.pad(x, each, value=value) if any(each) else x for x, each in zip(sequences, sides)], dim)
