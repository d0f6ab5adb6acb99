"""Which ranks hold the other stages of a parameter's model: for what is computed over all gradients, such as their norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["StageShare", "set_share", "shares_of"]


@dataclass(frozen=True)
class StageShare:
    """``group``: the ranks that hold the other stages. ``counts``: whether this rank's copy is the one that counts, of a
    parameter that several stages have."""

    group: dist.ProcessGroup
    counts: bool


_SHARES: WeakIdKeyDictionary = WeakIdKeyDictionary()


def set_share(parameter: torch.Tensor, share: StageShare) -> None:
    _SHARES[parameter] = share


def shares_of(parameters: Sequence[torch.Tensor]) -> list[StageShare | None]:
    return [_SHARES.get(parameter) for parameter in parameters]
