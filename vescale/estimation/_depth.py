"""Repeated blocks of a model: one stands for several equal ones that follow each other."""

from __future__ import annotations

from torch import nn

from vescale.estimation._skeleton import skeleton_of
from vescale.ir import Repeats

__all__ = ["first_and_last_of"]


def first_and_last_of(model: nn.Module, repeats: tuple[Repeats, ...]) -> nn.Module:
    """A copy of ``model`` without memory and without the modules of the runs between the first and the last; the rest keep
    their names."""
    left_out = [(run.path, name) for run in repeats for name in run.names[1:-1]]
    found = skeleton_of(model, [getattr(model.get_submodule(path), name) for path, name in left_out])
    for path, name in left_out:
        del found.get_submodule(path)._modules[name]
    return found
