"""What PyTorch's wrappers of modules add to the names of parameters."""

from __future__ import annotations

import re

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["WRAPPER_MODULES", "unwrapped_model", "unwrapped_name"]

WRAPPER_MODULES = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""Modules around the one that the script has named: activation checkpointing, ``torch.compile``, PyTorch's first FSDP."""

_PARTS = re.compile(rf"(?:^|(?<=\.))(?:{'|'.join(WRAPPER_MODULES)})\.")


def unwrapped_name(name: str) -> str:
    """The name of a parameter, buffer or module in the model without wrappers."""
    return _PARTS.sub("", name)


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Without ``DistributedDataParallel``, whose names begin with ``module.``."""
    return model.module if isinstance(model, DistributedDataParallel) else model
