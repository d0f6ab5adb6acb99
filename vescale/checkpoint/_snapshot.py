"""What one save holds: tensors by global name, and plain values; of a rank."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale.checkpoint._local_blocks import LocalBlocks, local_blocks
from vescale.checkpoint._model_state import check_model, get_random_state, model_state
from vescale.checkpoint._optimizer_state import named_optimizers, optimizer_state
from vescale.checkpoint._step_format import encode
from vescale.compat import AVERAGED_MODULES, bytes_of
from vescale.errors import UnsavableError
from vescale.runtime import Runtime

MODEL = "model"
RANDOM = "rng"
RESERVED = (MODEL, "optimizer", RANDOM, "step", "not_loaded")
_SAMPLE = 64  # elements at the front and at the back of a tensor


@dataclass
class Snapshot:
    """What this rank has of a save.

    Attributes:
        blocks: of all tensors, sorted by name. They refer to the tensors' memory: nothing is copied.
        values: JSON; ``model``, ``optimizers`` and ``beside``.
        buffers: names of tensors that may differ between ranks.
        program: of a parallelized model, as text.
        lacks_optimizer: the model has parameters that are trained, and no optimizer was given.
    """

    blocks: dict[str, LocalBlocks]
    values: dict[str, Any]
    buffers: set[str] = field(default_factory=set)
    program: str | None = None
    lacks_optimizer: bool = False

    def meshes(self) -> list[dict[str, Any]]:
        """Shapes and axes of the meshes that tensors are placed on."""
        found = []
        for mesh in dict.fromkeys(entry.mesh for entry in self.blocks.values() if entry.mesh is not None):
            known = {"shape": list(mesh.shape), "axes": list(mesh.mesh_dim_names or ())}
            if known not in found:
                found.append(known)
        return found


def take_snapshot(model: nn.Module | None, optimizer: Any, more: Mapping[str, Any], *, rng: bool = True) -> Snapshot:
    """No communication; nothing is copied. Raises CheckpointError for what cannot be saved, with its name."""
    for name in more:
        if name.split(".", 1)[0] in RESERVED or name == "optimizers":
            raise UnsavableError(
                f"{name!r} is a name that checkpoints use themselves; pass this value under another name"
            )
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, Any] = {"model": None, "optimizers": {}, "beside": {}}
    buffers: set[str] = set()
    names: dict[int, str] = {}
    program = None
    if model is not None:
        check_model(model)
        if optimizer is not None and any(module in AVERAGED_MODULES for module in model.modules()):
            raise UnsavableError(
                "the model's parameters are the averages that EMA.swap() has put in their place, from which training "
                "cannot continue: save after the swap has ended, or, to export the averages, save the model without "
                "an optimizer"
            )
        state = model_state(model)
        tensors |= {f"{MODEL}.{name}": tensor for name, tensor in state.tensors.items()}
        buffers = {f"{MODEL}.{name}" for name in state.buffers}
        names = state.names
        known = set(tensors)
        extra = encode(state.extra, MODEL, tensors)
        buffers |= tensors.keys() - known
        values["model"] = {"aliases": state.aliases, "extra": extra}
        runtime = Runtime.of(model)
        program = runtime.program.to_text(merge_layers=True) if runtime is not None else None
    for prefix, each in named_optimizers(optimizer).items():
        values["optimizers"][prefix] = optimizer_state(prefix, each, names, tensors)
    for key, value in more.items():
        try:
            values["beside"][key] = encode(_state_of(value), key, tensors)
        except RecursionError:
            raise UnsavableError(f"{key} contains itself, or is nested too deeply; expected plain data") from None
    if rng:
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        tensors[f"{RANDOM}.{rank}"] = get_random_state()
    blocks = {name: local_blocks(name, _resolved(tensors[name])) for name in sorted(tensors)}
    is_trained = model is not None and any(parameter.requires_grad for parameter in model.parameters())
    return Snapshot(blocks, values, buffers, program, is_trained and optimizer is None)


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Without a conjugation or negation that is done when the tensor is used: its memory has other values."""
    if type(tensor) is torch.Tensor and (tensor.is_conj() or tensor.is_neg()):
        return tensor.resolve_conj().resolve_neg()
    return tensor


def _state_of(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


def samples(snapshot: Snapshot) -> dict[str, str]:
    """Checksums of some elements of the tensors that every rank has whole: ranks that have different ones under one name
    (experts of their own) are found by them."""
    plain = {
        name: entry.local
        for name, entry in snapshot.blocks.items()
        if entry.mesh is None and entry.local is not None and entry.local.numel() and not name.startswith(RANDOM + ".")
    }
    if not plain:
        return {}
    picked = {name: _ends(local) for name, local in plain.items()}
    by_device: dict[torch.device, list[str]] = {}
    for name, piece in picked.items():
        by_device.setdefault(piece.device, []).append(name)
    found = {}
    for names in by_device.values():  # one copy from each device
        together: Any = torch.cat([picked[name] for name in names]).cpu().numpy()
        stops = list(itertools.accumulate(picked[name].numel() for name in names))
        for name, start, stop in zip(names, [0, *stops], stops):
            found[name] = f"{zlib.crc32(together[start:stop]):08x}"
    return found


def _ends(local: torch.Tensor) -> torch.Tensor:
    """Bytes of the first and last elements."""
    if local.numel() <= 2 * _SAMPLE:
        return bytes_of(local)
    if local.is_contiguous():
        flat = local.view(-1)
        return bytes_of(torch.cat([flat[:_SAMPLE], flat[-_SAMPLE:]]))
    first = local[(0,) * (local.ndim - 1)][:_SAMPLE]
    last = local[(-1,) * (local.ndim - 1)][-_SAMPLE:]
    return bytes_of(torch.cat([first, last]))
