"""The tensors among the arguments or results of an op."""

from __future__ import annotations

from typing import Any

import torch


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """Those in lists, tuples and dicts, too, in order. Ops have no other containers, and this is called for every op."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            if value:
                found += tensors_in(*value)
        elif isinstance(value, dict) and value:
            found += tensors_in(*value.values())
    return found
