"""What of a model is saved: its tensors by global name, each once, and values that are not tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vescale.compat import unwrapped_model, unwrapped_name
from vescale.errors import CheckpointOptionError, kind_of

__all__ = ["ModelState", "check_model", "load_extra", "model_state"]


@dataclass(frozen=True)
class ModelState:
    """The state of one model.

    Attributes:
        tensors: parameters and persistent buffers by name, those with several names (tied) under the first.
        aliases: further names of tied tensors, to their first.
        buffers: names of those that are not parameters.
        extra: what modules' ``get_extra_state`` returned.
        names: of parameters, by ``id``.
    """

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]
    buffers: set[str]
    extra: dict[str, Any]
    names: dict[int, str]


def check_model(model: Any) -> None:
    """Raises CheckpointOptionError for anything else than a module."""
    if not isinstance(model, nn.Module):
        raise CheckpointOptionError(
            f"model is {kind_of(model)}; expected a torch.nn.Module. Pass state dicts and other data by "
            "names of their own"
        )


def model_state(model: nn.Module) -> ModelState:
    """No communication. Groups of ``fully_shard`` and of plans that are gathered are sharded first. Names are those of the
    model itself: wrappers for compilation, activation checkpointing and DDP leave no trace."""
    model = unwrapped_model(model)
    found = ModelState({}, {}, set(), {}, {})
    first: dict[int, str] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        name = unwrapped_name(key)
        if not isinstance(value, torch.Tensor) or name.rpartition(".")[2] == "_extra_state":  # often a tensor of bytes
            found.extra[name] = value
            continue
        known = first.setdefault(id(value), name)
        if known != name:
            found.aliases[name] = known
            continue
        found.tensors[name] = value
        if isinstance(value, nn.Parameter):
            found.names[id(value)] = name
        else:
            found.buffers.add(name)
    return found


def load_extra(model: nn.Module, extra: dict[str, Any]) -> None:
    """Give modules back what their ``get_extra_state`` returned."""
    model = unwrapped_model(model)
    for path, module in model.named_modules():
        key = unwrapped_name(f"{path}._extra_state" if path else "_extra_state")
        if key in extra and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(extra[key])
