"""States that were saved, put in the place of an optimizer's own: what must be the same, and what dtype they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale.placements import distribute_tensor

__all__ = ["check_same_algorithms", "put_states"]


def check_same_algorithms(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Compare algorithms and blocks by parameter name, or by place where the groups have no names.

    Raises ValueError that names the first parameter that differs.
    """
    ours, theirs = _by_name(own), _by_name(saved)
    if not ours.keys() & theirs.keys():  # saved without names, or with other ones; torch compares sizes of groups
        ours, theirs = (dict(enumerate(found.values())) for found in (ours, theirs))
    for name, (algorithm, blocks) in ours.items():
        found = theirs.get(name, (algorithm, blocks))
        if found != (algorithm, blocks):
            raise ValueError(
                f"parameter {name!r} was saved with algorithm={found[0]!r} and blocks={found[1]!r}, and this optimizer has "
                f"algorithm={algorithm!r} and blocks={blocks!r}; make the groups alike, or load the parameters only"
            )


def _by_name(groups: Sequence[Mapping[str, Any]]) -> dict[Any, tuple[Any, Any]]:
    found: dict[Any, tuple[Any, Any]] = {}
    for position, group in enumerate(groups):
        names = group.get("param_names") or [f"group {position}, parameter {i}" for i in range(len(group["params"]))]
        for name in names:
            found[name] = (group.get("algorithm"), _plain(group.get("blocks")))
    return found


def _plain(blocks: Any) -> Any:
    return tuple(map(_plain, blocks)) if isinstance(blocks, list | tuple) else blocks


def put_states(
    optimizer: torch.optim.Optimizer,
    before: Mapping[torch.Tensor, Mapping[str, Any]],
    state_dict: Mapping[str, Any],
) -> None:
    """After torch's ``load_state_dict``, which casts states to the parameter's dtype: put what was saved, in its dtype, and
    placed like the states of ``before``. Whole tensors are cut without communication; DTensors that are placed
    otherwise are redistributed, on all ranks."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in zip(numbers, tensors):
        for name, value in state_dict["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor):
                optimizer.state[tensor][name] = _placed(value.detach(), before.get(tensor, {}).get(name))


def _placed(value: torch.Tensor, like: Any) -> torch.Tensor:
    if not isinstance(like, torch.Tensor):
        return value.clone()
    if not isinstance(like, DTensor):
        return value.to(like.device, copy=True)
    if not isinstance(value, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return (
        value.redistribute(placements=like.placements).clone()
        if value.device_mesh == like.device_mesh
        else value.clone()
    )
