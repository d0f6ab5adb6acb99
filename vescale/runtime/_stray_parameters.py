"""Plain parameters that come into a model after ``parallelize``: no plan entry places them, and nothing reduces them.

They are found when they are registered, so that a forward of a model without any pays a look at an empty list.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from vescale.errors import StrayParameterError
from vescale.runtime._adapters import adapter_parts, is_adapted
from vescale.runtime._runtime import Runtime


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
        f"{type(model).__name__}: plain parameters, registered after parallelize, which no entry places and whose gradients "
        "are not reduced. Add or replace modules and parameters before parallelize; to change only the values of a "
        "parameter, write them into the DTensor that is there: load_state_dict, or parameter.data = values, the same on "
        "every rank"
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
