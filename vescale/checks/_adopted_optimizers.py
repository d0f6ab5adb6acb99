"""Optimizers made before ``parallelize`` or ``fully_shard`` go on with the parameters that are there afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from vescale.checks._replaced_parameters import Replacement, replacement_of
from vescale.errors import AdoptionError, ArgumentTypeError, kind_of
from vescale.placements import distribute_tensor

__all__ = ["adopt_optimizers", "listed_optimizers"]

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


def adopt_optimizers(optimizers: Iterable[Optimizer], by: str) -> None:
    """Put the parameters of today in the groups of ``optimizers``, in place of those that ``by`` has replaced.

    Groups, their lists and the optimizers stay the same objects, so that schedulers go on. States of replaced parameters
    are cut as the parameters are: tensors of a parameter's shape, which must be the same on every rank, get its
    placements; numbers and 0-dim tensors stay. No communication. An optimizer that knows better has a method
    ``adopt_parameters``, which is given the new parameter of each one that is replaced.

    Raises ValueError, before anything is changed, for an optimizer with none of the parameters, and for states of other
    shapes.
    """
    changes: list[tuple[Optimizer, list[tuple[list[Any], int, Any, Any]]]] = []
    known_better: list[tuple[Any, dict[Any, Any]]] = []
    for optimizer in optimizers:
        found: list[tuple[list[Any], int, Any, Any]] = []
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                replaced = replacement_of(parameter)
                new = replaced.successor if replaced is not None else None
                if replaced is not None and new is not None and hasattr(optimizer, "adopt_parameters"):
                    found.append((group["params"], index, new, None))
                elif replaced is not None and new is not None:
                    state = _placed(optimizer.state.get(parameter), parameter, new, replaced)
                    found.append((group["params"], index, new, state))
        known = any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
        if not found and not known:
            raise AdoptionError(
                f"{by} got {kind_of(optimizer)} that holds none of the model's parameters; pass the optimizer that "
                "was made of model.parameters(), or make one afterwards"
            )
        if hasattr(optimizer, "adopt_parameters"):
            known_better.append((optimizer, {members[index]: new for members, index, new, _ in found}))
        else:
            changes.append((optimizer, found))
    for better, successors in known_better:
        better.adopt_parameters(successors)
    for optimizer, found in changes:
        for parameters, index, new, state in found:
            optimizer.state.pop(parameters[index], None)
            parameters[index] = new
            if state is not None:
                optimizer.state[new] = state


def _placed(state: Any, old: torch.Tensor, new: Any, replaced: Replacement) -> Any:
    if not isinstance(state, Mapping):
        return state
    return {key: _placed_value(key, value, old, new, replaced) for key, value in state.items()}


def _placed_value(key: Any, value: Any, old: torch.Tensor, new: Any, replaced: Replacement) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or key == "step":
        return value
    if value.shape == old.shape and isinstance(new, DTensor):
        return distribute_tensor(value.detach(), new.device_mesh, tuple(new.placements), src_data_rank=None)
    if value.ndim == 0:
        return value
    raise AdoptionError(
        f"the optimizer's state {key!r} of {replaced.name!r} has shape {tuple(value.shape)}, and the parameter "
        f"{tuple(old.shape)}: only states of the parameter's shape can be cut; pass an optimizer that has not stepped to "
        f"{replaced.by}, and load its state afterwards (load_state_dict)"
    )
