"""What ranks hold in common of a model's parameters and buffers, described before a forward, for them to compare."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, Shard

from vescale.checks import STATE, UNKNOWN, WRITTEN, hash_of, tensor_text
from vescale.compat import local_of, spec_of
from vescale.runtime._runtime import Runtime

__all__ = ["add_replica", "find_replicas", "long_axes"]

_MAX_NAMES = 120


def long_axes(runtime: Runtime) -> tuple[int, ...]:
    return tuple(axis for axis, size in enumerate(runtime.mesh.shape) if size > 1)


def find_replicas(runtime: Runtime, *, looks: bool) -> dict[tuple[int, ...], list[tuple[str, str]]]:
    """By axes along which ranks have the same part: parameters, and what tells their values. On devices whose
    kernels do not repeat their bits, before the first forward only. ``looks``: False: their values are unknown, as a mode
    would see the ops."""
    module, long = runtime.root, long_axes(runtime)
    found: dict[tuple[int, ...], list[tuple[str, str]]] = {}
    frozen: list[str] = []
    if module is None:
        return found
    for name, tensor in module.named_parameters():
        if isinstance(tensor, DTensor) and tensor.device_mesh == runtime.mesh:
            if not tensor.requires_grad:
                frozen.append(name)
            add_replica(runtime, found, f"parameter {name!r}", tensor, looks=looks)
    for name, buffer in module.named_buffers():
        # In a region, they may count what the rank has seen.
        if not runtime.is_in_local_region(name) and id(buffer) not in runtime.differ_on_purpose:
            add_replica(runtime, found, f"buffer {name!r}", buffer, looks=looks)
    if frozen:
        names = ", ".join(frozen)
        text = names if len(names) < _MAX_NAMES else f"{names[:_MAX_NAMES]}... ({len(frozen)}, {hash_of(names)})"
    rows = found.setdefault(long, [])
    if not runtime.has_local_regions:
        rows += _gradients_and_writes(runtime, module)
    rows.append((f"{STATE}requires_grad", f"False of {text}" if frozen else "True of all"))
    for path, part in module.named_modules():
        if part.training != module.training:
            rows.append((f"{STATE}training of module {path!r}", str(part.training)))
        if runtime.num_forwards == 1:
            rows += _hyperparameters(path, part)
    return found


def _gradients_and_writes(runtime: Runtime, module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Which parameters have gradients from before, and how often each was written to: of parts that other ranks do not hold,
    nothing else is the same on every rank."""
    names, held = [], 0
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh != runtime.mesh:
            continue
        held += 1
        if not parameter.is_leaf or parameter.grad is None:
            names.append(name)
        spec = spec_of(parameter)
        even = all(
            p.is_replicate() or (type(p) is Shard and parameter.shape[p.dim] % spec.mesh.size(axis) == 0)
            for axis, p in enumerate(spec.placements)
        )
        if even and not parameter.is_inference():
            yield f"{WRITTEN}number of writes to {name!r}", str(parameter._version)
    text = ", ".join(names) if len(names) < held else ""
    text = (
        f"all but {text}"
        if text and len(text) < _MAX_NAMES
        else f"{held - len(names)}, {hash_of(text)}"
        if text
        else ""
    )
    yield (
        f"{WRITTEN}which parameters have a gradient from before",
        UNKNOWN if runtime.gradients.has_accumulated else text or ("none" if names else "all"),
    )


def add_replica(
    runtime: Runtime,
    found: dict[tuple[int, ...], list[tuple[str, str]]],
    name: str,
    tensor: torch.Tensor,
    *,
    looks: bool,
) -> None:
    axes, local = long_axes(runtime), tensor
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != runtime.mesh:
            return
        axes, local = tuple(axis for axis in axes if tensor.placements[axis].is_replicate()), local_of(tensor)
    if axes and (local.is_cpu or runtime.num_forwards == 1):
        text = tensor_text(local.detach(), fully=True) if looks else UNKNOWN
        found.setdefault(axes, []).append((f"{STATE}{name}", text))


def _hyperparameters(path: str, module: torch.nn.Module) -> list[tuple[str, str]]:
    """The numbers among what a module declares as its constants, as PyTorch's own do: probabilities, momenta, epsilons."""
    own = vars(module)
    constants = [(name, own.get(name)) for name in getattr(type(module), "__constants__", ())]
    return [
        (f"{STATE}{name} of module {path!r}", repr(x)) for name, x in constants if isinstance(x, bool | int | float)
    ]
