"""The norm of the gradients of a model in stages, from the norms of each rank's."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from vescale.comm import record
from vescale.errors import TotalNormError
from vescale.gradients import StageShare, pipeline_groups

__all__ = ["norm_over_stages", "stages_that_wait"]


def norm_over_stages(
    shares: Sequence[StageShare | None],
    order: float,
    norm_of: Callable[[Sequence[int]], torch.Tensor],
    groups: Iterable[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """The norm of all gradients, of which some may be a part of models in stages.

    Communication: one number for each such model, over the ranks of its stages.

    Args:
        shares: for each gradient, what it is a part of; None: of no model in stages.
        order: of the norm.
        norm_of: the norm of the gradients with these numbers, as far as this rank's stages have them.
        groups: of the ranks of other models whose other stages may have gradients.
    """
    of_group: dict[dist.ProcessGroup, list[int]] = {group: [] for group in groups}
    others: list[int] = []
    for index, share in enumerate(shares):
        if share is None:
            others.append(index)
        else:
            of_group.setdefault(share.group, []).extend([index] if share.counts else [])
    if not of_group:
        return norm_of(others)
    known = pipeline_groups()
    norms = []
    for group, indices in of_group.items():
        own = norm_of(indices) if indices else torch.tensor(math.inf if order < 0 else 0.0)
        norms.append(_over_ranks(own.to(known[group].device), group, order))
    if others:
        norms.append(norm_of(others))
    return _combined(norms, order)


def stages_that_wait() -> dict[dist.ProcessGroup, torch.Tensor]:
    """For a rank that has no gradient to give: while one model in stages exists, the ranks of its other stages wait for this
    one. Their group, with a parameter of the model.

    Raises TotalNormError where several models in stages exist.
    """
    groups = pipeline_groups()
    if len(groups) > 1:
        gc.collect()  # models that are gone, and only hold each other
        groups = pipeline_groups()
    if len(groups) > 1:
        raise TotalNormError(
            f"the norm of no gradients, while {len(groups)} models in stages exist: which one's other stages wait for this "
            "rank cannot be known. Give the parameters themselves, also those without a gradient: "
            "vescale.optim.clip_grad_norm_(model.parameters(), ...)"
        )
    return groups


def _over_ranks(norm: torch.Tensor, group: dist.ProcessGroup, order: float) -> torch.Tensor:
    number = norm.double()
    gathered = [torch.empty_like(number) for _ in range(dist.get_world_size(group))]
    with record("all_gather", group.size(), number.nbytes * group.size(), requester="norm over stages", group=group):
        dist.all_gather(gathered, number, group=group)  # a maximum that is reduced may lose nan
    return _combined(gathered, order)


def _combined(norms: Sequence[torch.Tensor], order: float) -> torch.Tensor:
    every = torch.stack([norm.double().to(norms[0].device) for norm in norms])
    if math.isinf(order):
        return every.amax() if order > 0 else every.amin()
    if order == 0:
        return every.sum()
    return every.pow(order).sum().pow(1 / order)
