"""Selects the engine for the device on which numbers are generated."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from vescale.compat.devices import default_generator_of
from vescale.compat.tensor_subclasses import WrapperTensor, tree_leaves, tree_map_only
from vescale.errors import GeneratorError, UnsupportedRandomOpError
from vescale.placements import Region
from vescale.rng import _cpu_engine
from vescale.rng._mt19937 import Mt19937State
from vescale.rng._random_ops import Fill, RandomOp


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random ops on a device use by default."""
    if device.type == "cpu":
        return torch.default_generator
    found = default_generator_of(device)
    if found is None:
        raise UnsupportedRandomOpError(
            f"random numbers were requested on device {device}, whose torch module has no default_generators; "
            "generate them on the CPU and move the result"
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


# Initializers that draw again until no element is rejected: on a part of a tensor, or for their draws only.

# A part of a tensor on which elementwise code with random fills runs as if it were the whole tensor.
# ``nn.init.trunc_normal_`` draws again until no element is rejected. If PyTorch's own function runs on a :class:`Part`,
# this rank gets the elements of one device, with the algorithm of the installed version, provided that it consists of
# elementwise ops, in-place random fills and conditions on all elements.

aten = torch.ops.aten
_FILLS = {
    aten.uniform_.default: "uniform_",
    aten.normal_.default: "normal_",
    aten.exponential_.default: "exponential_",
    aten.log_normal_.default: "log_normal_",
}


class Part(WrapperTensor):
    """``local`` is the region's part of a whole tensor with ``global_strides``.

    ``anywhere(flag)`` returns whether a flag is set on any part of the whole tensor; it answers every ``bool()`` of a Part.
    """

    local: torch.Tensor
    region: Region
    global_strides: tuple[int, ...]
    anywhere: Callable[[bool], bool]

    @classmethod
    def of(
        cls, local: torch.Tensor, region: Region, global_strides: tuple[int, ...], anywhere: Callable[[bool], bool]
    ) -> Part:
        part = cls.with_looks_of(local)
        part.local, part.region, part.global_strides, part.anywhere = local, region, global_strides, anywhere
        return part

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Part(shape={tuple(self.shape)}, region={self.region})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first: Part = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Part))
        if func in _FILLS:
            generator = kwargs.get("generator")
            fill = Fill(RandomOp(_FILLS[func], tuple(args[1:])), first.region, first.global_strides)
            fill_region(first.local, fill, generator)
            return first
        if func is aten._local_scalar_dense.default:
            value = first.local.item()
            return first.anywhere(value) if isinstance(value, bool) else value
        plain_args, plain_kwargs = tree_map_only(Part, lambda part: part.local, (args, kwargs))
        out = func(*plain_args, **plain_kwargs)
        if not isinstance(out, torch.Tensor):
            return out
        return first if out is first.local else cls.of(out, first.region, first.global_strides, first.anywhere)


# The size of the ranges of a whole tensor that are generated only to find rejections.
_CHUNK_ELEMENTS = 1 << 20


def fill_part(
    initializer: Callable[..., Any],
    arguments: tuple[Any, ...],
    local: torch.Tensor,
    region: Region,
    global_strides: tuple[int, ...],
    generator: torch.Generator | None,
    anywhere: Callable[[bool], bool] = bool,
) -> None:
    """Run an initializer of elementwise ops, such as ``nn.init``'s ``trunc_normal_``, on one part of a whole tensor.

    The values are those of one device. ``anywhere(flag)`` returns whether a flag is set on any part of the tensor. Without
    it, the rounds end when this part has no rejected element: the values are the same, but the generator is not advanced as
    far.
    """
    initializer(Part.of(local, region, global_strides, anywhere), *arguments, generator)


def replay_draws(
    initializer: Callable[..., Any],
    arguments: tuple[Any, ...],
    shape: tuple[int, ...],
    global_strides: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> None:
    """Advance ``generator`` as the initializer on a whole tensor would: with O(chunk) memory, in the time of one device."""
    start = generator.get_state()
    furthest, most = start, 0
    for region in _stretches(shape):
        generator.set_state(start)
        rounds = 0

        def count(flag: bool) -> bool:
            nonlocal rounds
            rounds += 1
            return flag

        local = torch.empty(region.local_shape, dtype=dtype, device=generator.device)
        fill_part(initializer, arguments, local, region, global_strides, generator, count)
        if rounds >= most:
            furthest, most = generator.get_state(), rounds
    generator.set_state(furthest)


def _stretches(shape: tuple[int, ...]) -> Iterator[Region]:
    """Split a shape into row-major ranges; at least one, which may be empty."""
    whole = tuple(((0, size),) for size in shape)
    numel = math.prod(shape)
    for start in range(0, max(numel, 1), _CHUNK_ELEMENTS):
        yield Region(shape, whole, (start, min(start + _CHUNK_ELEMENTS, numel)))


def host_random_state() -> Any:
    """The states of the generators of Python and numpy."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else numpy.random.get_state(legacy=False)


def has_drawn(before: Any) -> bool:
    """Whether these generators have other states than before."""
    return repr(host_random_state()) != repr(before)


def set_host_random_state(state: Any) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


@contextlib.contextmanager
def host_draws_undone() -> Iterator[Any]:
    """Afterwards, these generators are as before. Yields the states."""
    before = host_random_state()
    try:
        yield before
    finally:
        set_host_random_state(before)
