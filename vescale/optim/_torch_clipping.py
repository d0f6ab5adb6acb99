"""Lets ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` take norms over all stages of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale.compat import install_part
from vescale.gradients import pipeline_groups, shares_of_gradients
from vescale.optim._clip import get_total_norm

__all__ = ["extend_torch_clipping"]


class _StageNorms:
    """In place of PyTorch's norm, for gradients of models in stages; none at all may be those of a stage without any."""

    total_norm = staticmethod(get_total_norm)

    @staticmethod
    def concern(gradients: Sequence[torch.Tensor]) -> bool:
        return any(shares_of_gradients(gradients)) if gradients else bool(pipeline_groups())


def extend_torch_clipping() -> None:
    """Once in a process; see the part ``stages`` of the table of patches."""
    install_part("stages", _StageNorms())
