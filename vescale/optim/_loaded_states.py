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
    if not ours.keys() & theirs.keys():  # saved without names, or with other ones: torch compares the sizes of the groups
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


def put_states(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """After torch's ``load_state_dict``, which casts states to the parameter's dtype, and leaves whole tensors whole."""
    saved = state_dict["state"]
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in zip(numbers, tensors):
        for name, value in saved.get(number, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            mine = optimizer.state[tensor][name]
            if mine.dtype != value.dtype:
                device = mine.device if value.ndim else value.device
                mine = optimizer.state[tensor][name] = value.detach().to(device, copy=True)
            if isinstance(tensor, DTensor) and not isinstance(mine, DTensor) and mine.shape == tensor.shape and mine.ndim:
                optimizer.state[tensor][name] = distribute_tensor(
                    mine, tensor.device_mesh, tensor.placements, src_data_rank=None
                )
