"""Adapters that PEFT adds to a model that is parallelized already.

PEFT takes the shape of an adapter from its base layer's weight, and for a DTensor from the local one, because with Hugging
Face's tensor parallelism a module computes on its shard. Here modules compute what one device does. So while PEFT makes an
adapter (from the moment that it takes the base layer until it puts the adapted module in its place), the base layer shows its
whole weight as a plain parameter; what PEFT writes to that (PiSSA does) is written to the shards.

The adapters' own parameters stay plain, the same on every rank: a parallelized forward takes them as global tensors, and their
gradients are complete.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook

from vescale.runtime._runtime import Runtime
from vescale.runtime._saving import add_save_pretrained
from vescale.runtime._tensor_placement import place_tensor

__all__ = ["watch_adapters"]

_HANDLES: list[Any] = []
_SHOWN: dict[int, list[tuple[nn.Module, str, nn.Parameter, int, int]]] = {}  # by ``id`` of the adapted module


def watch_adapters() -> None:
    """Let PyTorch tell of modules that are registered; idempotent. It costs a call for each, and nothing in a forward."""
    if not _HANDLES:
        _HANDLES.append(register_module_module_registration_hook(_on_registration))


def _on_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    if id(child) in _SHOWN:
        _hide(id(child))
    elif type(module).__module__.partition(".")[0] == "peft":
        if name == "base_layer":
            _show(module, child)
        elif name == "base_model":
            found = (Runtime.of(inner) for inner in (child, getattr(child, "model", None)) if inner is not None)
            runtime = next((runtime for runtime in found if runtime is not None), None)
            if runtime is not None:
                add_save_pretrained(runtime, module)


def _show(adapted: nn.Module, base: nn.Module) -> None:
    """Hide the sharded parameters of ``base`` behind whole ones. Communication: an all-gather of each."""
    for name, parameter in list(base._parameters.items()):
        if isinstance(parameter, DTensor) and Runtime.around(base) is not None:
            whole = nn.Parameter(parameter.detach().full_tensor(), requires_grad=parameter.requires_grad)
            base.__dict__[name] = whole
            _SHOWN.setdefault(id(adapted), []).append((base, name, whole, whole._version, whole.data_ptr()))


def _hide(key: int) -> None:
    for base, name, whole, version, pointer in _SHOWN.pop(key):
        shown = base.__dict__.pop(name, whole)
        own = base._parameters[name]
        assert isinstance(own, DTensor)
        if shown is not whole or shown._version != version or shown.data_ptr() != pointer:
            with torch.no_grad():
                own.copy_(place_tensor(shown.detach(), own.device_mesh, own.placements, name))
