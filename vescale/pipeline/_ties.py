"""``Ties``: parameters that several stages use. Each stage has a copy, and all copies get the sum of their gradients."""

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


class Ties:
    """The parameters of this rank that other ranks along the pipeline have, too; in the order of the model's names."""

    def __init__(self, model: nn.Module, cut: Cut, schedule: Schedule, group: dist.ProcessGroup, rank: int) -> None:
        self.model = model
        self.tied: list[tuple[str, dist.ProcessGroup]] = []
        self._aside: dict[str, torch.Tensor] = {}
        self._contributed: set[str] = set()  # names of those whose `.grad` is of steps that have not been synchronized
        for name, stages in cut.owners.items():
            ranks = sorted({schedule.rank_of[stage] for stage in stages})
            if len(ranks) > 1 and rank in ranks:
                members = tuple(sorted(dist.get_global_rank(group, r) for r in ranks))
                self.tied.append((name, group_of_ranks(members, "tied parameters")))

    def _parameters(self) -> Sequence[tuple[str, nn.Parameter, dist.ProcessGroup]]:
        """Those that have gradients. (They are looked up in every step: parameters of units are replaced.)"""
        found = [(name, self.model.get_parameter(name), group) for name, group in self.tied]
        return [one for one in found if one[1].requires_grad]

    def are_among(self, parameters: Sequence[torch.Tensor]) -> bool:
        tied = {id(parameter) for _, parameter, _ in self._parameters()}
        return any(id(parameter) in tied for parameter in parameters)

    def set_aside(self) -> None:
        """Take complete gradients of earlier steps away, so that this step's can be added up apart from them.

        Where this step does not synchronize (``no_sync``), its contributions stay in ``.grad``, and those of later steps
        come to them; a gradient that has become None since, by ``zero_grad()``, takes what was set aside with it.
        """
        for name, parameter, _ in self._parameters():
            if name in self._contributed:
                if parameter.grad is None:
                    self._aside.pop(name, None)
            elif parameter.grad is not None:
                self._aside[name], parameter.grad = parameter.grad, None
            self._contributed.add(name)

    def complete(self) -> None:
        """At the end of a step that synchronizes. Communication: as :meth:`add_up`'s."""
        self.add_up()
        for name, parameter, _ in self._parameters():
            before = self._aside.get(name)
            if before is not None and parameter.grad is not None:
                with torch.no_grad():
                    before.add_(parameter.grad)
                parameter.grad = before
        self._aside.clear()
        self._contributed.clear()

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
