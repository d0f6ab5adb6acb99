"""What ranks with other stages of a model hold: for what is computed over all gradients, such as their norm, and for
checkpoints."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from vescale.compat import living_items


@dataclass(frozen=True)
class StageShare:
    """``group``: the ranks that hold the other stages. ``counts``: whether this rank's copy is the one that counts, of a
    parameter that several stages have. ``place``: among the parameters of the whole model."""

    group: dist.ProcessGroup
    counts: bool
    place: int


# By name in each model. (Parameters must have no weak references: to_empty() exchanges their contents.)
_SHARES: weakref.WeakKeyDictionary[nn.Module, Mapping[str, StageShare]] = weakref.WeakKeyDictionary()


def set_shares(model: nn.Module, shares: Mapping[str, StageShare]) -> None:
    """Of the model's parameters on this rank, by name."""
    _SHARES[model] = shares


def _known() -> Iterator[tuple[torch.Tensor, StageShare]]:
    for model, shares in living_items(_SHARES):
        for name, share in shares.items():
            yield model.get_parameter(name), share


def shares_of(parameters: Sequence[torch.Tensor]) -> list[StageShare | None]:
    known = {id(parameter): share for parameter, share in _known()}
    return [known.get(id(parameter)) for parameter in parameters]


def shares_of_gradients(gradients: Sequence[torch.Tensor]) -> list[StageShare | None]:
    """Of the parameters whose ``.grad`` they are."""
    known = {id(p.grad): share for p, share in _known() if p.grad is not None}
    return [known.get(id(gradient)) for gradient in gradients]


def pipeline_groups() -> dict[dist.ProcessGroup, torch.Tensor]:
    """The groups over which models of this process are cut into stages, while such a model exists, each with one of the
    model's parameters on this rank."""
    return {share.group: parameter for parameter, share in _known()}


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
