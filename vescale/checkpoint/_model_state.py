"""What of a model is saved: its tensors by global name, each once, and values that are not tensors."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.checkpoint._step_format import decode, encode
from vescale.compat import unwrapped_model, unwrapped_name
from vescale.compat.devices import random_states, set_random_states
from vescale.errors import ArgumentError, kind_of
from vescale.fsdp import FSDPModule


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
    """Raises ArgumentError for anything else than a module."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"model is {kind_of(model)}; expected a torch.nn.Module. Pass state dicts and other data as keyword "
            "arguments"
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


# The parameters and buffers of a model that a checkpoint holds, under the names that a state dict gives them.


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, tied ones under each of their names; nothing is copied.

    Modules of ``fully_shard`` are resharded first, so that these are the tensors at rest. Prefixes that wrappers of
    ``torch.compile`` and activation checkpointing add are left out.
    """
    modules = modules_by_path(model)
    for _, module in modules:
        if isinstance(module, FSDPModule):
            module.reshard()
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for path, module in modules:
        if not module._parameters and not module._buffers:
            continue
        prefix = unwrapped_name(f"{path}.") if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters[prefix + name] = parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                buffers[prefix + name] = buffer
    return parameters | buffers


def modules_by_path(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What ``named_modules(remove_duplicate=False)`` yields, without a generator for each module inside of another."""
    found: list[tuple[str, nn.Module]] = []

    def visit(path: str, module: nn.Module) -> None:
        found.append((path, module))
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{path}.{name}" if path else name, child)

    visit("", model)
    return found


def tied_groups(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of one tensor, or of tensors on the same memory, together; in the order of first names."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_memory(tensor), []).append(name)
    return list(groups.values())


def _memory(tensor: torch.Tensor) -> object:
    if isinstance(tensor, DTensor) or tensor.is_meta or type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return id(tensor)
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def replace_tensors(model: nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Register other tensors in the place of those with the given ids, under all of their names."""
    for module in model.modules():
        registered: tuple[dict[str, torch.Tensor | None], ...] = (module._parameters, module._buffers)  # type: ignore[assignment]
        for tensors in registered:
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) in made:
                    tensors[name] = made[id(tensor)]


# The state of all random number generators of a process that a script uses without naming them, as a tensor of bytes.

_SEEDS = {"torch": "torch.manual_seed", "numpy": "numpy.random.seed", "python": "random.seed"}
"""Functions that seed; of an accelerator the one of its module."""


def get_random_state() -> torch.Tensor:
    """Those of torch (CPU and the accelerator's current device), numpy and Python."""
    found = {
        "torch": torch.get_rng_state().numpy(),
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    found |= {kind: state.numpy() for kind, state in random_states().items()}
    text = json.dumps(encode(found, "rng", {}), separators=(",", ":"))
    return torch.from_numpy(np.frombuffer(text.encode(), np.uint8).copy())


def set_random_state(state: torch.Tensor) -> None:
    found = decode(json.loads(state.numpy().tobytes()))
    torch.set_rng_state(torch.from_numpy(found["torch"]))
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])
    set_random_states({kind: torch.from_numpy(found[kind]) for kind in found.keys() - _SEEDS.keys()})


def different_seeds(states: Sequence[torch.Tensor]) -> list[str]:
    """The functions that seed those generators whose states are not all equal."""
    found = [json.loads(state.numpy().tobytes()) for state in states]
    keys = dict.fromkeys((*_SEEDS, *(key for each in found for key in each)))
    differ = [key for key in keys if len({json.dumps(each.get(key)) for each in found}) > 1]
    return [_SEEDS.get(key, f"torch.{key}.manual_seed") for key in differ]
