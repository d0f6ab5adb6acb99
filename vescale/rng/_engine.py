"""Chooses the engine by the device that the numbers are generated on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale.placements import Region
from vescale.rng import _cpu
from vescale.rng._ops import RandomOp

__all__ = ["default_generator", "fill_region"]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on a device use unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.init()
        return torch.cuda.default_generators[index]
    raise NotImplementedError(
        f"random numbers on device {device}: single-device semantics are implemented for cpu and cuda; "
        "generate on one of those and move the result"
    )


def fill_region(
    local: torch.Tensor,
    region: Region,
    global_strides: Sequence[int],
    op: RandomOp,
    generator: torch.Generator | None = None,
    parameter: torch.Tensor | None = None,
) -> None:
    """Fill ``local`` with its part of ``op`` on a whole tensor; see :func:`vescale.rng._cpu.fill_region`."""
    generator = default_generator(local.device) if generator is None else generator
    if local.device.type != generator.device.type:
        raise ValueError(
            f"{op.name}: a tensor on {local.device} and a generator on {generator.device}; expected one device: "
            f"pass a torch.Generator({str(local.device)!r})"
        )
    if local.device.type == "cpu":
        _cpu.fill_region(local, region, global_strides, op, generator, parameter)
    else:
        raise NotImplementedError(local.device)
