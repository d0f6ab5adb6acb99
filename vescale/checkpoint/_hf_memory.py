"""Memory for models that have none yet, and values for what a checkpoint does not hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.checkpoint._hf_conversion import is_transformers_model
from vescale.checkpoint._model_tensors import replace_tensors
from vescale.errors import HfLoadError
from vescale.fsdp import unfilled
from vescale.rng import is_deferred, materialize

__all__ = ["fill_the_rest", "give_memory", "give_parts_memory"]


def give_memory(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None
) -> dict[int, torch.Tensor]:
    """Replace deferred and meta tensors of a model by empty ones, under all of their names; by id of what they replace.

    Deferred tensors come to the device that the constructor chose, meta tensors to the current default device.
    """
    made: dict[int, torch.Tensor] = {}
    for tensor in tensors.values():
        if isinstance(tensor, DTensor) or (not tensor.is_meta and not is_deferred(tensor)):
            continue
        device = tensor.device if is_deferred(tensor) and tensor.device.type != "meta" else torch.get_default_device()
        kept = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        values = torch.empty(tensor.shape, dtype=kept, device=device)
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        values.__dict__.update({key: value for key, value in tensor.__dict__.items() if key != "_is_param"})
        made[id(tensor)] = values
    if made:
        replace_tensors(model, made)
    return made


def give_parts_memory(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Give this rank's parts of DTensors on the meta device memory on the devices of their meshes; whether there are any."""
    if not any(isinstance(tensor, DTensor) and tensor.is_meta for tensor in tensors.values()):
        return False

    def given(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=tensor.device_mesh.device_type)

    model._apply(given)
    return True


def fill_the_rest(model: nn.Module, *, is_new: bool) -> None:
    """Give values to what is still deferred (as the constructor would), and to what is on the meta device, or got memory and
    no values (as transformers would).

    ``is_new``: memory was given to a part of the model, so that attributes may be deferred, too.

    Raises CheckpointError for other models with tensors without values that no file holds.
    """
    names = dict(unfilled(model))
    if not names and not is_new and not _has_tensors_without_values(model):
        return
    materialize(model)
    rest = {
        name: tensor
        for named in (model.named_parameters(), model.named_buffers())
        for name, tensor in named
        if tensor.is_meta and not isinstance(tensor, DTensor)
    }
    if not rest and not names:
        return
    if not is_transformers_model(model):
        raise HfLoadError(
            f"{', '.join([*rest, *names][:5])}: without values before, and not in the checkpoint, so that their values are "
            "unknown; build the model under vescale.deferred_init(), which keeps what the constructor computes"
        )
    device = torch.get_default_device()
    made: dict[int, torch.Tensor] = {}
    for tensor in rest.values():
        empty = torch.empty_like(tensor, device=device)
        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    replace_tensors(model, made)
    made |= {id(tensor): tensor for tensor in names.values()}
    fresh = {id(tensor) for tensor in made.values()}
    marked = [t for named in (model.parameters(), model.buffers()) for t in named if id(t) not in fresh]
    for tensor in marked:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        model.initialize_weights()  # type: ignore[operator]
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)


def _has_tensors_without_values(model: nn.Module) -> bool:
    modules: list[nn.Module | None] = [model]
    while modules:
        module = modules.pop()
        if module is None:
            continue
        modules += module._modules.values()
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not isinstance(tensor, DTensor) and (tensor.is_meta or is_deferred(tensor)):
                return True
    return False
