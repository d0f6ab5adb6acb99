"""What ranks with other stages of a model hold: for what is computed over all gradients, such as their norm, and for
checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["OtherStages", "StageShare", "other_stages", "set_other_stages", "set_share", "shares_of"]


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


@dataclass(frozen=True)
class OtherStages:
    """The tensors of a model that only other ranks have: those with these names, and all in these modules."""

    names: frozenset[str] = frozenset()
    modules: tuple[str, ...] = ()

    def have(self, name: str) -> bool:
        """``name``: of a tensor, or of an optimizer's state of it (``weight.exp_avg``)."""
        return name in self.names or name.rpartition(".")[0] in self.names or name.startswith(self.modules or "\0")


_OTHERS = "_vescale_other_stages"


def set_other_stages(model: nn.Module, others: OtherStages) -> None:
    model.__dict__[_OTHERS] = others


def other_stages(model: nn.Module) -> OtherStages:
    """Nothing for a model without a pipeline."""
    found: OtherStages = model.__dict__.get(_OTHERS) or OtherStages()
    return found
