"""Adapters that PEFT adds to a model that is parallelized already.

PEFT takes the shape of an adapter from its base layer's weight, and for a DTensor from the local one, because with Hugging
Face's tensor parallelism a module computes on its shard. Here modules compute what one device does. So while PEFT makes an
adapter (from the moment that it takes the base layer until it puts the adapted module in its place), the base layer shows
its whole weight as a plain parameter; what PEFT writes to that (PiSSA does) is written to the shards.

While adapters are merged into their base layers, taken out of them, combined, or added to others, both show whole plain
parameters, too.

Methods that share matrices between layers (VeRA) make them before any layer, by the shapes of all: all layers show their
whole weights then.

The adapters' own parameters stay plain, the same on every rank: a parallelized forward takes them as global tensors, and
their gradients are complete.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.errors import StrayParameterError
from vescale.runtime._runtime import BoundMethod, Runtime
from vescale.runtime._saving import add_save_pretrained
from vescale.runtime._tensor_placement import place_tensor

# Where a sharded tensor is registered, its name, and the tensor itself, in whose place a whole one is shown.
_Shown = tuple[dict[str, Any], str, DTensor]

_BEFORE_INJECTION = "_pre_injection_hook"


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a layer of PEFT around one of the model, with ``adapter_layer_names`` of its own."""
    return type(module).__module__.partition(".")[0] == "peft" and hasattr(module, "adapter_layer_names")


def adapter_parts(layer: nn.Module) -> tuple[str, ...]:
    """Names of the attributes of a layer of PEFT that hold its adapters."""
    names: Any = layer.adapter_layer_names
    return tuple(names)


def add_merging(runtime: Runtime, module: nn.Module) -> None:
    """Give a module of PEFT methods that add, merge and combine adapters on whole tensors, as one device does."""
    if type(module).__module__.partition(".")[0] == "peft":
        names = ("merge", "unmerge", "update_layer") if is_adapted(module) else ("add_weighted_adapter",)
        for name in names:
            BoundMethod.give(runtime, module, name, functools.partial(_with_whole_parameters, name))


def _with_whole_parameters(name: str, runtime: Runtime, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """All ranks of the mesh call it. Communication: an all-gather of each sharded parameter of the layer; of several layers,
    of their adapters."""
    parts: list[nn.Module] = [module]
    if not is_adapted(module):
        layers = [layer for layer in module.modules() if is_adapted(layer)]
        parts = [getattr(layer, part) for layer in layers for part in adapter_parts(layer) if hasattr(layer, part)]
    shown = [one for part in parts for inner in part.modules() for one in _show_whole(inner)]
    try:
        return getattr(type(module), name)(module, *args, **kwargs)
    finally:
        _write_back(shown)


def _show_whole(module: nn.Module) -> Iterator[_Shown]:
    """Put whole plain tensors in the place of sharded parameters and buffers."""
    tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for registered in tensors:
        for name, own in registered.items():
            if isinstance(own, DTensor):
                whole: torch.Tensor = own.detach().full_tensor()  # type: ignore[attr-defined]
                is_parameter = isinstance(own, nn.Parameter)
                registered[name] = nn.Parameter(whole, requires_grad=own.requires_grad) if is_parameter else whole
                yield registered, name, own


def _write_back(shown: list[_Shown]) -> None:
    """Put the sharded tensors back, with the values that stand in their place. (What PEFT writes to ``weight.data`` does not
    count as a version of the parameter.)"""
    for registered, name, own in shown:
        whole, registered[name] = registered.get(name), own
        if whole is not None and not whole.is_meta:
            with torch.no_grad():
                own.copy_(place_tensor(whole.detach(), own.device_mesh, own.placements, name))


def _show_before_injection(tuner: nn.Module, model: nn.Module) -> None:
    """Methods that share matrices between layers (VeRA) make them before any layer, by the shapes of all."""
    runtime, method = Runtime.of(model), getattr(type(tuner), _BEFORE_INJECTION, None)
    if runtime is not None and method is not None and method.__qualname__ != f"BaseTuner.{_BEFORE_INJECTION}":
        BoundMethod.give(runtime, tuner, _BEFORE_INJECTION, _with_whole_model)


def _with_whole_model(runtime: Runtime, tuner: nn.Module, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """All ranks of the mesh call it. Communication: an all-gather of each sharded parameter of the model."""
    shown = [one for inner in model.modules() for one in _show_whole(inner)]
    try:
        return getattr(type(tuner), _BEFORE_INJECTION)(tuner, model, *args, **kwargs)
    finally:
        _write_back(shown)


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
            elif name == "model":
                _show_before_injection(module, child)
            elif name == "base_model":
                found = (Runtime.of(inner) for inner in (child, getattr(child, "model", None)) if inner is not None)
                runtime = next((runtime for runtime in found if runtime is not None), None)
                if runtime is not None:
                    add_save_pretrained(runtime, module)

    def _show(self, adapted: nn.Module, base: nn.Module) -> None:
        """Hide the sharded parameters of ``base`` behind whole ones. Communication: an all-gather of each."""
        if Runtime.around(base) is not None:
            self._shown[id(adapted)] = weakref.ref(adapted), base, list(_show_whole(base))

    def _hide(self, key: int) -> None:
        adapted, base, shown = self._shown.pop(key)
        _write_back(shown)
        runtime, layer = Runtime.around(base), adapted()
        if runtime is not None and layer is not None:
            add_merging(runtime, layer)


# Plain parameters that come into a model after ``parallelize``: no plan entry places them, and nothing reduces them.
#
# They are found when they are registered, so that a forward of a model without any pays a look at an empty list.


class StrayWatch:
    """What is called when a module or a parameter is registered in any module of the program; it passes modules on to
    ``modules``.

    The parameters of PEFT's adapters, which are the same on every rank, and whose gradients are complete, may come later.
    """

    def __init__(self, modules: Callable[[nn.Module, str, nn.Module | None], None]) -> None:
        self._modules = modules

    def __call__(self, module: nn.Module, name: str, registered: nn.Module | nn.Parameter | None) -> None:
        if not isinstance(registered, nn.Parameter):
            self._modules(module, name, registered)
        if registered is None:
            return
        # First what is cheap: forwards register modules, too (a slice of a ModuleList is a new one).
        runtime = Runtime.around(module)
        if runtime is None or runtime.has_adopted(registered):
            return
        if next(_plain_names(registered), None) is not None:
            runtime.strays.append((weakref.ref(module), name))


def check_strays(runtime: Runtime) -> None:
    """Before a forward, if there were any. Raises PlanError for those that are still there."""
    model, found = runtime.root, []
    for owner, name in runtime.strays:
        module = owner()
        registered = None if module is None else module._modules.get(name, module._parameters.get(name))
        plain = next(_plain_names(registered), None) if registered is not None else None
        if plain is None or model is None:
            continue
        path = next((path for path, each in model.named_modules() if each is module), None)
        where = None if path is None else ".".join(part for part in (path, name, plain) if part)
        if where is not None and where not in found and not _is_of_adapter(model, where):
            found.append(where)
    if not found:
        runtime.strays.clear()
        return
    raise StrayParameterError(
        f"{', '.join(repr(name) for name in found[:4])}{f' and {len(found) - 4} more' if len(found) > 4 else ''} of "
        f"{type(model).__name__}: plain parameters that were registered after parallelize, which no entry places and "
        "whose gradients are not reduced. Add or replace modules and parameters before parallelize; to change only "
        "the values of a parameter, write them into the existing DTensor: load_state_dict, or parameter.data = "
        "values, the same on every rank"
    )


def _is_of_adapter(model: nn.Module, name: str) -> bool:
    """Whether the parameter is in a part of a layer of PEFT that holds its adapters."""
    module, found = model, False
    for part in name.split(".")[:-1]:
        if is_adapted(module):
            found = part in adapter_parts(module)
        module = module.get_submodule(part)
    return found


def _plain_names(registered: nn.Module | nn.Parameter) -> Iterator[str]:
    """Names of the plain parameters in a module, but in modules of PEFT; "" of a plain parameter."""
    if isinstance(registered, nn.Parameter):
        if not isinstance(registered, DTensor):
            yield ""
        return
    if type(registered).__module__.partition(".")[0] == "peft":
        return
    yield from (name for name, p in registered._parameters.items() if p is not None and not isinstance(p, DTensor))
    for name, child in registered.named_children():
        yield from (f"{name}.{inner}" for inner in _plain_names(child))
