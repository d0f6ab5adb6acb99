"""Selects the engine for the device on which numbers are generated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale.compat.devices import default_generator_of
from vescale.errors import GeneratorError, UnsupportedRandomOpError
from vescale.placements import Region
from vescale.rng import _cpu_engine
from vescale.rng._fill_request import Fill
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._random_ops import RandomOp


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on a device use by default."""
    if device.type == "cpu":
        return torch.default_generator
    found = default_generator_of(device)
    if found is None:
        raise UnsupportedRandomOpError(
            f"random numbers on device {device}, whose module of torch has no default_generators; generate on the cpu and "
            "move the result"
        )
    return found


def fill_region(
    local: torch.Tensor, fill: Fill, generator: torch.Generator | None = None, parameter: torch.Tensor | None = None
) -> None:
    """Fill ``local`` with its part of a fill of a whole tensor; see :func:`vescale.rng._cpu_engine.fill_region`."""
    generator = default_generator(local.device) if generator is None else generator
    if local.device.type != generator.device.type:
        raise GeneratorError(
            f"{fill.op.name}: a tensor on {local.device} and a generator on {generator.device}; expected one device: "
            f"pass a torch.Generator({str(local.device)!r})"
        )
    if local.device.type == "cpu":
        _cpu_engine.fill_region(local, fill, generator, parameter)
    else:
        from vescale.rng import _cuda_engine  # programs without a GPU do not load it

        _cuda_engine.fill_region(local, fill, generator, parameter)


def advance(
    shape: Sequence[int],
    strides: Sequence[int],
    op: RandomOp,
    dtype: torch.dtype,
    generator: torch.Generator,
    parameter_dtype: torch.dtype | None = None,
) -> None:
    """Advance ``generator`` as ``op`` on a whole tensor would, without generating numbers."""
    nothing = Region(tuple(shape), tuple(((0, size),) for size in shape), (0, 0))
    parameter = None if parameter_dtype is None else torch.empty(0, dtype=parameter_dtype, device=generator.device)
    local = torch.empty(0, dtype=dtype, device=generator.device)
    fill_region(local, Fill(op, nothing, tuple(strides)), generator, parameter)


def saved_state(generator: torch.Generator) -> bytes:
    """The state of a generator; on a CPU in half the bytes."""
    if generator.device.type == "cpu":
        return Mt19937State.of(generator).packed()
    return generator.get_state().numpy().tobytes()


def generator_at(state: bytes, device: torch.device) -> torch.Generator:
    """A new generator in a saved state."""
    generator = torch.Generator(device)
    if device.type == "cpu":
        Mt19937State.unpacked(state).write_to(generator)
    else:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator


def skip_outputs(generator: torch.Generator, number: int) -> None:
    """Step over 32-bit outputs of a CPU generator."""
    Mt19937State.of(generator).skip(number).write_to(generator)


def fill_spans(generator: torch.Generator, number: int) -> None:
    """Generate ``number`` single elements that are far from each other, as a rank does whose part of a tensor is not in one
    piece: what the spans of such a fill take."""
    shape = (number, 2 * _cpu_engine.GAP_ELEMENTS)
    region = Region(shape, (((0, number),), ((0, 1),)))
    fill_region(torch.empty(number, 1), Fill(RandomOp("uniform_", (0.0, 1.0)), region, (shape[1], 1)), generator)
