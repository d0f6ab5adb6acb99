"""``clip_grad_norm_``, ``get_total_norm`` and ``GradScaler`` of PyTorch look at the gradients of all stages of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale.comm import record
from vescale.compat import install_part
from vescale.gradients import pipeline_groups, shares_of, shares_of_gradients
from vescale.optim._clip import get_total_norm
from vescale.optim._coupled_steps import refuse_coupled_steps

__all__ = ["extend_torch_for_stages"]

_INSTALLED: list[bool] = []  # hooks of optimizers


class _OverStages:
    """In place of what PyTorch computes of this rank's gradients, for models in stages; none at all may be those of a stage
    without any."""

    total_norm = staticmethod(get_total_norm)

    @staticmethod
    def concern(gradients: Sequence[torch.Tensor]) -> bool:
        return any(shares_of_gradients(gradients)) if gradients else bool(pipeline_groups())

    @staticmethod
    def share_overflow(parameters: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]) -> bool:
        groups = dict.fromkeys(share.group for share in shares_of(parameters) if share is not None)
        known = pipeline_groups()
        for group in groups:
            found = torch.stack([flag.to(known[group].device) for flag in flags]).amax()
            with record("all_reduce", group.size(), found.nbytes, requester="overflow in any stage", group=group):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
            for flag in flags:
                flag.copy_(found)
        return bool(groups)


def extend_torch_for_stages() -> None:
    """Once in a process; see the part ``stages`` of the table of patches."""
    if not _INSTALLED:
        _INSTALLED.append(True)
        refuse_coupled_steps()
    install_part("stages", _OverStages())
