"""What other tools meet in a parallelized model: those that would compute something else, or fail, are told what to do.

Everything here is an attribute of the model's own modules that the tool asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from vescale.compat import note, refuse_composable_apis
from vescale.errors import ForeignToolError, kind_of
from vescale.fsdp import mark_unfilled, places_on_meta
from vescale.runtime._runtime import BoundMethod, Runtime

_REDUCED = "its plan already distributes its parameters and reduces their gradients"
_INSTEAD = {
    "DistributedDataParallel": f"{_REDUCED}: call the model directly, shard the batch over an axis by the plan's <in> "
    "entries, and accumulate gradients with vescale.no_sync(model). With accelerate, "
    "leave the model out of prepare(); Hugging Face's Trainer wraps it, and is not "
    "supported",
    "fully_shard": f"{_REDUCED}: let the plan shard parameters, {{axis: {{init: Ragged, run: R}}}} (docs/plans.md, "
    "ZeRO), with a unit entry for each group of parameters that is gathered together",
    "parallelize_module": "its plan shards its parameters: write the styles as entries of the plan, "
    'ColwiseParallel as plan.shard("path.weight", Shard(0), mesh="tp"), RowwiseParallel as Shard(1) and a Replicate "<out>"',
    "torch.jit.script": "it runs hooks and DTensors in Python, which TorchScript cannot represent: script functions "
    "of local tensors inside it, or export a single-device model that has loaded its state dict",
    "torch.jit.trace": "a trace would contain this rank's part of each tensor: trace a single-device model that has "
    "loaded its state dict (save_pretrained writes one for Hugging Face models)",
    "torch.export": "an exported program would contain this rank's part of each tensor: export a single-device model "
    "that has loaded its state dict (save_pretrained writes one for Hugging Face models)",
}


_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "DataParallel": "DataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
    "ScriptModule": "torch.jit",
}

_DISTRIBUTED = "_distribute_module_applied"
"""What DTensor's ``distribute_module`` looks at before it changes a module, and sets afterwards."""


def meet_foreign_tools(runtime: Runtime, model: nn.Module) -> None:
    """Give the modules of a parallelized model what tools ask for. They are copied with the model."""
    for module in model.modules():
        refuse_composable_apis(module, ("fully_shard",), _refuse)
        module.__dict__[_DISTRIBUTED] = _Refused("parallelize_module")
        module.__dict__["__prepare_scriptable__"] = _Refused("torch.jit.script")
    note("runtime._foreign_tools:instance", model)
    attributes = model.__dict__
    attributes["_ddp_params_and_buffers_to_ignore"] = _Refused("DistributedDataParallel")
    BoundMethod.give(runtime, model, "_apply", _apply)


def refuse_wrapped(model: nn.Module) -> None:
    """Before ``parallelize``. Raises ForeignToolError for a model that another tool distributes already."""
    for path, module in model.named_modules():
        kinds = [
            kind.__name__ for kind in type(module).__mro__ if kind.__module__.split(".")[0] in ("torch", "vescale")
        ]
        if "OptimizedModule" in kinds:
            raise ForeignToolError(
                f"parallelize got a model of which {_place(path, module)} is wrapped by torch.compile, which has no "
                "effect around modules of a plan: pass the original model (model._orig_mod), and compile functions "
                "of local tensors inside it"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise ForeignToolError(
                f"parallelize got a model of which {_place(path, module)} is nn.SyncBatchNorm, which reduces "
                "statistics over the ranks itself: remove convert_sync_batchnorm. In a parallelized model, "
                "nn.BatchNorm already uses the statistics of the global batch, as on one device"
            )
        tool = next((_WRAPPERS[name] for name in kinds if name in _WRAPPERS), None)
        if module.__dict__.get(_DISTRIBUTED) is True:
            tool = "parallelize_module"
        if tool is not None:
            raise ForeignToolError(
                f"parallelize got a model of which {_place(path, module)} is already distributed by {tool}: both "
                "would shard its parameters or reduce its gradients. Pass the original model to parallelize, and use "
                "the plan instead: <in> entries shard the batch over an axis, and unit entries shard parameters "
                "(docs/plans.md)"
            )


def _place(path: str, module: nn.Module) -> str:
    return f"its part {path!r}" if path else f"{kind_of(module)}"


def refuse_export(tool: str, model: Any) -> None:
    """Raises ForeignToolError where a module of ``model`` belongs to a parallelized one."""
    if isinstance(model, nn.Module) and any(
        isinstance(module.__dict__.get(_DISTRIBUTED), _Refused) for module in model.modules()
    ):
        _refuse(tool)


def refuse_tracing() -> None:
    """At the beginning of the model's forward, which a function that is exported may call. Raises ForeignToolError while it
    is being exported or traced."""
    if torch.compiler.is_exporting():
        _refuse("torch.export")
    if torch.jit.is_tracing():
        _refuse("torch.jit.trace")


def _refuse(tool: str) -> NoReturn:
    raise ForeignToolError(f"{tool} of a parallelized model: {_INSTEAD[tool]}")


class _Refused:
    """Raises ForeignToolError when it is called, or read as a collection or a truth value."""

    def __init__(self, tool: str) -> None:
        self.tool = tool

    def __call__(self) -> NoReturn:
        _refuse(self.tool)

    def __bool__(self) -> bool:
        _refuse(self.tool)

    def __iter__(self) -> Iterator[str]:
        _refuse(self.tool)


def _changes_nothing(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> bool:
    """``to("cpu:0")``, as Trainer moves models, copies tensors that are on the CPU already."""
    found = fn(tensor)
    if found is tensor:
        return True
    is_conversion = getattr(fn, "__qualname__", "") == "Module.to.<locals>.convert"
    same = found.dtype == tensor.dtype and found.stride() == tensor.stride()
    return is_conversion and same and found.device.type == tensor.device.type == "cpu"


def _apply(runtime: Runtime, model: Any, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """``to``, ``half`` and the like: nothing where they change nothing.

    Raises ForeignToolError for what cannot be converted any more (:mod:`vescale.compat.model_patches`).
    """
    tensors = [*model.parameters(), *model.buffers()]
    with torch.no_grad():
        if tensors and not tensors[0].is_meta and all(_changes_nothing(fn, tensor) for tensor in tensors):
            return model
    without_values = places_on_meta(model)
    try:
        result = type(model)._apply(model, fn, *args, **kwargs)
        mark_unfilled(without_values)
        return result
    except RuntimeError as error:
        if not isinstance(error.__cause__, ForeignToolError):  # that of a swap
            raise
        raise ForeignToolError(
            f"this {type(model).__name__} cannot be moved or converted after parallelize, whose gradient hooks hold "
            "its parameters: call to(), half() or bfloat16() before parallelize, or set the dtype of the computation "
            "in the plan, plan.precision('', param='bfloat16')"
        ) from None
