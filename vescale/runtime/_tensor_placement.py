"""Converting parameters and buffers to DTensors, in all places of a model where they are registered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, make_dtensor, make_spec
from vescale.errors import ParallelizeError
from vescale.placements import contiguous_stride, distribute_tensor, local_region, normalize_placements, redistribute


def place_tensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], name: str) -> DTensor:
    """A DTensor with ``placements`` of a tensor that is the same on every rank, without communication.

    A meta tensor gives a meta DTensor; a DTensor on the same mesh is redistributed.
    """
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != mesh:
            raise ParallelizeError(
                f"{name} of shape {tuple(tensor.shape)} is a DTensor on {tensor.device_mesh}, and the plan's mesh is "
                f"{mesh}; parallelize a model of plain tensors, or write the plan for the model's mesh"
            )
        return redistribute(cast(DTensor, tensor.detach()), mesh, tuple(placements))
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        raise ParallelizeError(
            f"{name} is a {plain.layout} tensor of shape {tuple(plain.shape)}, to be placed as {tuple(placements)}: sparse "
            "tensors must be the same on every rank. Remove the entry, or register a dense tensor, x.to_dense()"
        )
    if plain.is_meta:
        wanted = normalize_placements(placements, plain.shape, mesh)
        coordinate = mesh.get_coordinate()
        shape = (
            (0,) if coordinate is None else local_region(plain.shape, wanted, tuple(mesh.shape), coordinate).local_shape
        )
        local = torch.empty(shape, dtype=plain.dtype, device="meta")
        return make_dtensor(local, make_spec(mesh, wanted, plain.shape, contiguous_stride(plain.shape), plain.dtype))
    made = distribute_tensor(plain, mesh, placements, src_data_rank=None)
    return made if plain.is_contiguous() else _in_order_of(plain, made)


def _in_order_of(plain: torch.Tensor, made: DTensor) -> DTensor:
    """``made``, whose dims have the order of those of ``plain`` in memory on every rank, as its strides say: PyTorch gives a
    DTensor the strides of the plain tensor, and may copy its parts row by row."""
    local = local_of(made)
    if local.ndim != plain.ndim:
        return made
    stride = torch.empty_like(plain, device="meta").stride()  # without gaps
    order = sorted(range(plain.ndim), key=lambda dim: -stride[dim])
    back = sorted(range(plain.ndim), key=lambda place: order[place])
    spec = make_spec(made.device_mesh, made.placements, plain.shape, stride, plain.dtype)
    return make_dtensor(local.permute(order).contiguous().permute(back), spec)


class TensorSlots:
    """Where each parameter and buffer of a model is registered: several places for a tied one.

    Replacing a tensor replaces it in all of them, so that tied parameters stay tied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots: dict[int, list[tuple[nn.Module, str, str]]] = {}
        self._names: dict[str, torch.Tensor] = {}
        for path, module in model.named_modules():
            for kind in ("_parameters", "_buffers"):
                for name, tensor in getattr(module, kind).items():
                    if tensor is not None:
                        self._slots.setdefault(id(tensor), []).append((module, kind, name))
                        self._names[f"{path}.{name}" if path else name] = tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every slot, tied ones under each of their names."""
        return iter(self._names.items())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._names[name]

    def places(self, name: str) -> list[tuple[nn.Module, str]]:
        """(module, name in it) of every place where the tensor called ``name`` is registered."""
        return [(module, slot) for module, _, slot in self._slots[id(self._names[name])]]

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def replace(self, name: str, new: DTensor) -> torch.Tensor:
        """Register ``new`` in all places of ``name``; a parameter stays one, with its requires_grad and attributes."""
        old = self._names[name]
        placed: Any = new
        if isinstance(old, nn.Parameter):
            placed = nn.Parameter(new, requires_grad=old.requires_grad)
            placed.__dict__.update(old.__dict__)
        for module, kind, slot in self._slots.pop(id(old)):
            getattr(module, kind)[slot] = placed
        for other, tensor in list(self._names.items()):
            if tensor is old:
                self._names[other] = placed
        self._slots[id(placed)] = []
        return placed


def load_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before ``load_state_dict``: slices plain tensors, which are the same on every rank, without communication."""
    for name, own in (*module.named_parameters(prefix.rstrip(".")), *module.named_buffers(prefix.rstrip("."))):
        given = state.get(name)
        if not isinstance(own, DTensor) or not isinstance(given, torch.Tensor) or isinstance(given, DTensor):
            continue
        if given.shape == own.shape:  # torch reports another one
            state[name] = place_tensor(given.to(own.device), own.device_mesh, own.placements, name)
