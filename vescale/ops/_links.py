"""DTensors that are one tensor on one device, and several here: ``csrc/links.h``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import local_of
from vescale.ops._boundary_copies import IN_PYTHON
from vescale.ops._boundary_copies import settle as _settle
from vescale.ops._conversion import NATIVE as _native


def link_view(local: torch.Tensor, copy: torch.Tensor, update: Callable[[torch.Tensor], None]) -> bool:
    """Have ``update(tensor with the storage of copy)`` called before an op reads ``copy``, which is viewed in place of
    ``local``, after a write to ``local``. False where nothing watches for that."""
    return bool(_native.link_view(local, copy, update))


def share_version(x: torch.Tensor, copy: DTensor) -> None:
    """Writes to one of the two count as writes to both, for autograd, as far as there is C++ for it."""
    _native.share_version(copy, x)


def settle_view(copy: torch.Tensor) -> None:
    """An op has written to a copy that is viewed, and its source has the same values by now."""
    _native.settle_view(copy)


def settle(written: DTensor, other: DTensor) -> None:
    """Of the two tensors of a conversion with ``outdated``, ``other`` has the values of ``written`` now."""
    if IN_PYTHON:
        _settle(local_of(written), local_of(other))
    else:
        _native.settle_group(local_of(written), local_of(other))
