"""``save_pretrained`` of a parallelized model, and adapters that PEFT adds to one.

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
import os
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.agreement import Round
from vescale.compat import note
from vescale.errors import ConsensusError, ForeignToolError, RankFailedError, StrayParameterError
from vescale.runtime._runtime import BoundMethod, Runtime
from vescale.runtime._tensor_placement import place_tensor

# ``save_pretrained`` of a parallelized model: one rank writes what one device would, with the class's own method.


# How long ranks wait for the one that writes.
_WRITING = timedelta(days=1)


def add_save_pretrained(runtime: Runtime, module: nn.Module) -> None:
    """Give a module whose class has a ``save_pretrained`` (Hugging Face's, diffusers', PEFT's) one of its own."""
    BoundMethod.give(runtime, module, "save_pretrained", _save_pretrained)


def whole_state_dict(module: nn.Module, keep: bool, given: Any = None) -> dict[str, Any]:
    """The state dict with plain tensors in host memory, tied ones as one tensor; empty where ``keep`` is false.

    All ranks of the mesh call it. Communication: an all-gather of each sharded tensor, one tensor at a time, so that ranks
    that do not keep it need memory for one.
    """
    names: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    names.update(module.named_buffers(remove_duplicate=False))
    found: dict[str, Any] = {}
    first: dict[int, str] = {}  # by ``id`` of a tensor of the model
    for name, value in (module.state_dict() if given is None else given).items():
        before = first.setdefault(id(names.get(name, value)), name)
        if before == name:
            whole: Any = value
            if isinstance(whole, DTensor):
                with torch.no_grad():
                    whole = whole.full_tensor()
            if keep:
                found[name] = whole.cpu() if isinstance(whole, torch.Tensor) else whole
        elif keep:
            found[name] = found[before]
    return found


def _save_pretrained(
    runtime: Runtime, module: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
) -> Any:
    """The class's own method, on the first rank of the mesh, which writes each file once; all ranks call it.

    Returns what the method does, None on the other ranks. Raises, on every rank: ValueError for ranks that give different
    folders; ConsensusError naming the ranks that do not come (within ``VESCALE_TIMEOUT`` seconds, or the timeout of
    collectives); PlanError for parameters without values; RuntimeError with what the writing rank has raised.
    """
    mesh = runtime.mesh
    if mesh.get_coordinate() is None:
        return None
    if kwargs.get("distributed_checkpoint"):
        raise ForeignToolError(
            "save_pretrained(distributed_checkpoint=True) is for models that transformers has sharded; save "
            "model.state_dict() with torch.distributed.checkpoint instead, or leave the argument out"
        )
    ranks = sorted(mesh.mesh.flatten().tolist())
    own = dist.get_rank() if dist.is_initialized() else ranks[0]
    writes = own == ranks[0]
    round_ = _agree(module, mesh, ranks, os.path.abspath(save_directory))
    missing = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if missing:
        raise ForeignToolError(
            f"save_pretrained: {missing[0]} and {len(missing) - 1} more are on the meta device, without values"
        )
    prompts = _prompts(module)
    state = whole_state_dict(module, writes, kwargs.pop("state_dict", None))
    problem: Exception | None = None
    result = None
    if writes:
        kwargs["is_main_process"] = True
        note("runtime._adapters:instance", module)
        replaced: dict[str, Any] = {"state_dict": lambda *_, **__: dict(state)}
        if prompts:
            replaced["get_prompt_embedding_to_save"] = prompts.__getitem__
        vars(module).update(replaced)
        try:
            result = type(module).save_pretrained(module, save_directory, *args, **kwargs)
        except Exception as error:
            problem = error
        finally:
            for name in replaced:
                del vars(module)[name]
    _finish(round_, problem)
    return result


def _prompts(module: Any) -> dict[str, torch.Tensor]:
    """Of PEFT's methods that adapt prompts: what their encoders give for each adapter. All ranks run these parts of the
    model."""
    configs = getattr(module, "peft_config", {})
    names = [name for name, config in configs.items() if getattr(config, "is_prompt_learning", False)]
    with torch.no_grad():
        found = {name: module.get_prompt_embedding_to_save(name) for name in names if name in module.prompt_encoder}
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()}


def _agree(module: nn.Module, mesh: DeviceMesh, ranks: list[int], folder: str) -> Round | None:
    if len(ranks) == 1 or not dist.is_initialized():
        return None
    consensus = Round(ranks, "save_pretrained")
    call = f"{type(module).__name__}.save_pretrained({folder!r})"
    about = f"{call}: every rank of the mesh must call it, not only `if rank == 0:`"
    folders = [found.decode() for found in consensus.exchange(folder.encode(), lambda: about)]
    if len(set(folders)) > 1:
        given = ", ".join(f"{folder!r} on rank {rank}" for rank, folder in zip(ranks, folders))
        raise ForeignToolError(
            f"save_pretrained: ranks pass different folders: {given}; pass the same folder on all ranks (the first "
            "rank writes it)"
        )
    return consensus


def _finish(rounds: Round | None, problem: Exception | None) -> None:
    """All ranks leave together: the files are there then."""
    if rounds is None:
        if problem is not None:
            raise problem
        return
    rounds.have_all_come("written", "", _WRITING)
    try:
        with rounds.together(lambda: "save_pretrained"):
            if problem is not None:
                raise problem
    except ConsensusError as error:
        if not error.failure:
            raise
        raise RankFailedError(
            f"save_pretrained failed on rank {error.ranks[0]}, which writes: {error.failure}"
        ) from None


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
