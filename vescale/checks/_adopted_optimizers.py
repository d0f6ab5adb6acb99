"""Optimizers made before ``parallelize`` or ``fully_shard`` go on with the parameters that are there afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.checks._replaced_parameters import replacement_of
from vescale.errors import AdoptionError, ArgumentTypeError, kind_of
from vescale.placements import distribute_tensor

__all__ = ["adopt_optimizers", "check_optimizers", "listed_optimizers"]

Optimizers = Optimizer | Iterable[Optimizer] | None


def listed_optimizers(optimizers: Optimizers, caller: str) -> list[Optimizer]:
    """Raises TypeError for what has no parameter groups."""
    if optimizers is None:
        return []
    found: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in found:
        if not isinstance(getattr(one, "param_groups", None), list):
            raise ArgumentTypeError(
                f"{caller} got optimizer={type(one).__name__}; expected an optimizer with param_groups, or several in a "
                "list (a scheduler keeps its optimizer, which is what to pass)"
            )
    return found


def check_optimizers(optimizers: Iterable[Optimizer], named: Iterable[tuple[str, nn.Parameter]], by: str) -> None:
    """Raises ValueError, before ``by`` replaces the parameters ``named``, for an optimizer with none of them, nor of those
    that were replaced before, and for states of other shapes, which cannot be cut."""
    known = {id(parameter): name for name, parameter in named}
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(id(p) in known or isinstance(p, DTensor) or replacement_of(p) is not None for p in held):
            raise AdoptionError(
                f"{by} got {kind_of(optimizer)} that holds none of the model's parameters; pass the optimizer that "
                "was made of model.parameters(), or make one afterwards"
            )
        if hasattr(optimizer, "adopt_parameters"):
            continue
        for parameter in held:
            state = optimizer.state.get(parameter)
            if id(parameter) in known and isinstance(state, Mapping):
                for key, value in state.items():
                    if _is_cut(key, value) and value.shape != parameter.shape and value.ndim > 0:
                        raise AdoptionError(
                            f"the optimizer's state {key!r} of {known[id(parameter)]!r} has shape {tuple(value.shape)}, and "
                            f"the parameter {tuple(parameter.shape)}: only states of the parameter's shape can be cut; "
                            f"pass an optimizer that has not stepped to {by}, and load its state afterwards "
                            "(load_state_dict)"
                        )


def adopt_optimizers(optimizers: Iterable[Optimizer]) -> None:
    """Put the parameters of today in the groups of ``optimizers``, in place of those that were replaced.

    Groups, their lists and the optimizers stay the same objects, so that schedulers go on. States of replaced parameters
    are cut as the parameters are: tensors of a parameter's shape, which must be the same on every rank, get its
    placements; numbers and 0-dim tensors stay. No communication. An optimizer that knows better has a method
    ``adopt_parameters``, which is given the new parameter of each one that is replaced.
    """
    for optimizer in optimizers:
        successors: dict[Any, Any] = {}
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced = replacement_of(parameter)
                new = replaced.successor if replaced is not None else None
                if new is None:
                    continue
                successors[parameter] = new
                if hasattr(optimizer, "adopt_parameters"):
                    continue
                group["params"][index] = new
                state = optimizer.state.pop(parameter, None)
                if state is not None:
                    optimizer.state[new] = _placed(state, parameter.shape, new)
        if hasattr(optimizer, "adopt_parameters"):
            optimizer.adopt_parameters(successors)


def _is_cut(key: Any, value: Any) -> bool:
    """Whether a value of a parameter's state is a tensor that is placed as the parameter is."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and key != "step"


def _placed(state: Any, shape: torch.Size, new: Any) -> Any:
    if not isinstance(state, Mapping) or not isinstance(new, DTensor):
        return state
    mesh, placements = new.device_mesh, tuple(new.placements)
    return {
        key: distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
        if _is_cut(key, value) and value.shape == shape
        else value
        for key, value in state.items()
    }
