"""The parameters and buffers of a model that a checkpoint holds, under the names that a state dict gives them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.compat import unwrapped_name
from vescale.fsdp import FSDPModule

__all__ = ["model_tensors", "modules_by_path", "replace_tensors", "tied_groups"]


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
