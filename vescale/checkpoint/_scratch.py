"""Memory for bytes on their way that goes back to the system as soon as nobody has it."""

from __future__ import annotations

import mmap

import torch


def scratch(nbytes: int) -> torch.Tensor:
    """``nbytes`` bytes in the host's memory, not initialized to anything in particular.

    The allocator of C may keep what is freed, once for each thread and size, so that a bound on memory would not hold.
    """
    return torch.frombuffer(mmap.mmap(-1, max(1, nbytes)), dtype=torch.uint8)[:nbytes]
