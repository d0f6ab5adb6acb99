"""Adapters that PEFT adds to a model that is parallelized already.

PEFT takes the shape of an adapter from its base layer's weight, and for a DTensor from the local one, because with Hugging
Face's tensor parallelism a module computes on its shard. Here modules compute what one device does. So while PEFT makes an
adapter (from the moment that it takes the base layer until it puts the adapted module in its place), the base layer shows
its whole weight as a plain parameter; what PEFT writes to that (PiSSA does) is written to the shards.

The adapters' own parameters stay plain, the same on every rank: a parallelized forward takes them as global tensors, and
their gradients are complete.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.runtime._runtime import Runtime
from vescale.runtime._saving import add_save_pretrained
from vescale.runtime._tensor_placement import place_tensor

__all__ = ["AdapterWatch"]

# A parameter's name; what is shown in its place, with its version and memory when it was shown.
_Shown = tuple[str, nn.Parameter, int, int]


class AdapterWatch:
    """What is called when a module is registered (``ModelHooks.registered``); nothing of it runs in a forward."""

    def __init__(self) -> None:
        # By ``id`` of the adapted module: it, the base layer, and what is shown there.
        self._shown: dict[int, tuple[weakref.ref[nn.Module], nn.Module, list[_Shown]]] = {}

    def __call__(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None:
            return
        for key in [key for key, (adapted, _, _) in self._shown.items() if adapted() is None]:
            self._hide(key)  # making it has failed
        if id(child) in self._shown:
            self._hide(id(child))
        elif type(module).__module__.partition(".")[0] == "peft":
            if name == "base_layer":
                self._show(module, child)
            elif name == "base_model":
                found = (Runtime.of(inner) for inner in (child, getattr(child, "model", None)) if inner is not None)
                runtime = next((runtime for runtime in found if runtime is not None), None)
                if runtime is not None:
                    add_save_pretrained(runtime, module)

    def _show(self, adapted: nn.Module, base: nn.Module) -> None:
        """Hide the sharded parameters of ``base`` behind whole ones. Communication: an all-gather of each."""
        if Runtime.around(base) is None:
            return
        shown: list[_Shown] = []
        for name, parameter in base._parameters.items():
            if isinstance(parameter, DTensor):
                whole = nn.Parameter(parameter.detach().full_tensor(), requires_grad=parameter.requires_grad)
                base.__dict__[name] = whole
                shown.append((name, whole, whole._version, whole.data_ptr()))
        self._shown[id(adapted)] = weakref.ref(adapted), base, shown

    def _hide(self, key: int) -> None:
        _, base, shown_parameters = self._shown.pop(key)
        for name, whole, version, pointer in shown_parameters:
            shown = base.__dict__.pop(name, whole)
            own = base._parameters[name]
            assert isinstance(own, DTensor)
            if shown is not whole or shown._version != version or shown.data_ptr() != pointer:
                with torch.no_grad():
                    own.copy_(place_tensor(shown.detach(), own.device_mesh, own.placements, name))
