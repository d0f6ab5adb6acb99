"""Tensors made inside a model's forward: every rank makes the global tensor and keeps its local part."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import in_transform
from vescale.ops import wrap_global
from vescale.runtime._activation import Activation
from vescale.runtime._input_checks import note_made

# Functions that make a tensor from numbers. Random ones draw the same on every rank: generators are in the same state.
_NAMES = """
    arange as_tensor asarray bartlett_window blackman_window empty empty_permuted empty_strided eye full hamming_window
    hann_window kaiser_window linspace logspace normal ones rand randint randn randperm range scalar_tensor tensor
    tril_indices triu_indices zeros
"""
FACTORIES = frozenset(getattr(torch, name) for name in _NAMES.split())

# The same as methods of a plain tensor; on a DTensor they are DTensor's own.
METHOD_FACTORIES = frozenset(
    getattr(torch.Tensor, name) for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
)


_OF_DATA = frozenset((torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.Tensor.new_tensor))
"""Of these, the values come from the program."""


def place_made(activation: Activation, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a factory and give its result the placements of the running module's ``factory`` entry, Replicate without one."""
    made = func(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or isinstance(made, DTensor) or "out" in kwargs or in_transform():
        return made  # what a function makes under vmap (masks) is plain there, and global where it meets a DTensor
    if func in _OF_DATA and activation.runtime.compares_made:
        note_made(activation.runtime, f"a tensor of torch.{func.__name__}", activation.frames[-1].path, made)
    placements = activation.factory_placements()
    if any(getattr(placement, "dim", -1) >= made.ndim for placement in placements):
        placements = activation.replicated  # a scalar or an index vector inside a region of sharded factories
    return wrap_global(made, activation.mesh, placements, "factory")
