"""Parameters that several stages use: each stage has a copy, and all copies get the sum of their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.comm import group_of_ranks, record
from vescale.compat import local_of
from vescale.pipeline._cut import Cut
from vescale.pipeline._schedule import Schedule

__all__ = ["Ties"]

Kept = list[tuple[nn.Parameter, torch.Tensor | None]]


class Ties:
    """The parameters of this rank that other ranks along the pipeline have, too; in the order of the model's names."""

    def __init__(self, model: nn.Module, cut: Cut, schedule: Schedule, group: dist.ProcessGroup, rank: int) -> None:
        self.model = model
        self.tied: list[tuple[str, dist.ProcessGroup]] = []
        for name, stages in cut.owners.items():
            ranks = sorted({schedule.rank_of[stage] for stage in stages})
            if len(ranks) > 1 and rank in ranks:
                members = tuple(sorted(dist.get_global_rank(group, r) for r in ranks))
                self.tied.append((name, group_of_ranks(members, "tied parameters")))

    def _parameters(self) -> Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]]:
        """Those that have gradients. (They are looked up in every step: parameters of units are replaced.)"""
        found = [(name, self.model.get_parameter(name), group) for name, group in self.tied]
        return [one for one in found if one[1].requires_grad]

    def set_aside(self, *, everything: bool = False) -> Kept:
        """Take gradients of earlier steps away: of tied parameters, or of all."""
        parameters = (
            list(self.model.parameters()) if everything else [parameter for _, parameter, _ in self._parameters()]
        )
        kept = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return kept

    @torch.no_grad()
    def add_up(self) -> None:
        """Communication: one all-reduce for each tied parameter, over the ranks that have it."""
        for name, parameter, group in self._parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = local_of(parameter.grad) if isinstance(parameter.grad, DTensor) else parameter.grad
            num_bytes = 2 * gradient.nbytes * (group.size() - 1) // group.size()
            with record("all_reduce", group.size(), num_bytes, requester=f"tied over stages: {name}.grad", group=group):
                dist.all_reduce(gradient, group=group)

    @torch.no_grad()
    def put_back(self, kept: Kept, scale: float) -> None:
        """Add gradients that were set aside to those of this step, which are multiplied by ``scale`` first."""
        for parameter, before in kept:
            new = parameter.grad
            if new is not None and scale != 1.0:
                new.mul_(scale)
            if before is not None:
                if new is not None:
                    before.add_(new)
                parameter.grad = before
