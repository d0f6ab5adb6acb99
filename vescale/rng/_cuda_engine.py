"""The CUDA engine: fills a rank's part of a tensor with the native op on whole chunks, or with a kernel of this package.

A chunk is what all threads of the device write in one pass. If the generator's offset is advanced to a chunk, the native op
writes exactly the elements of the chunks that follow, so that nothing has to be known about the distribution;
:mod:`vescale.rng._philox` computes the chunks. Shards of inner dims have pieces in every chunk: these, and fills of fewer
elements than the device has threads, are written element by element by :mod:`vescale.rng._cuda_kernel` after it has given
the native bits on this device. If the checks recognize neither, the whole tensor is generated.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vescale.errors import GeneratorError, RandomOpError, UnsupportedRandomOpError
from vescale.rng import _cuda_kernel
from vescale.rng._fill_request import Fill, copy_out, fill_from_whole, laid_out_as
from vescale.rng._philox import (
    ChunkedRule,
    GridStride,
    Launch,
    PhiloxRule,
    PhiloxState,
    Quads,
    Vectors,
    fits_one_launch,
    leaves,
)
from vescale.rng._random_ops import DROPOUT_MASK, RandomOp
from vescale.rng._stream_spans import Span, spans

# Gaps of at most this many elements are generated and dropped; spans of at most this many are copied from scratch memory.
GAP_ELEMENTS = 1 << 22
SCRATCH_CHUNKS = 8
# The cost of an element of our kernel in elements of the native op, if a rank owns all elements of few blocks, or a few of
# many blocks. From counted instructions, not measured.
KERNEL_COST = 1.5


@dataclass(frozen=True)
class Device:
    """The engine's interface to a GPU; tests replace it by an emulation.

    ``native(op, out, state, parameter, final)`` runs the native op from a generator state and, if ``final`` is a list,
    appends the state after the op to it. ``kernel(native_fill, local, spans, parameter)`` fills the pieces of the spans, or
    returns False if it cannot.
    """

    launch: Launch
    native: Callable[..., None]
    kernel: Callable[..., bool]


def fill_region(
    local: torch.Tensor, fill: Fill, generator: torch.Generator, parameter: torch.Tensor | None = None
) -> None:
    """As :func:`vescale.rng._cpu_engine.fill_region`, for a CUDA tensor and generator, on the current stream of its device.

    On other accelerators, how ops draw is not known: every rank fills the whole tensor and keeps its part.

    Memory: a few chunks beyond ``local``. Raises RuntimeError while a CUDA graph is captured.
    """
    local = local.detach()
    if local.device.type != "cuda":
        fill.check(local)
        arguments = None if parameter is None else laid_out_as(local, parameter)
        fill_from_whole(fill, local, arguments, lambda whole, given: fill.op.fill(whole, generator, given))
        return
    index = local.device.index or 0
    with torch.cuda.device(local.device):
        if torch.cuda.is_current_stream_capturing():
            raise RandomOpError(
                f"{fill.op.name} on a sharded tensor of shape {fill.shape} while a CUDA graph is captured: a replay "
                "would draw the captured numbers again; expected no capture: leave the random op out of the graph, "
                "or replicate the tensor, for which the native op runs"
            )
        _check_arguments(fill.op, local.dtype, None if parameter is None else parameter.dtype, index)
        if local.is_complex():
            fill, local = fill.as_real(local)
        rule = probed_rule(_RuleKey(fill.op, local.dtype, parameter is not None, index))
        final = generate(local, fill, read_state(generator), device_at(index), rule, parameter)
        write_state(generator, final)


def generate(
    local: torch.Tensor,
    fill: Fill,
    state: PhiloxState,
    device: Device,
    rule: PhiloxRule | None,
    parameter: torch.Tensor | None = None,
) -> PhiloxState:
    """Fill ``local`` and return the state that one device would leave. ``rule`` is None if it is not known."""
    n, op, region = fill.numel, fill.op, fill.region
    fill.check(local)
    if n == 0:
        return state
    if parameter is not None:
        if not fill.is_row_major:
            raise UnsupportedRandomOpError(
                f"{op.name} with a tensor of probabilities on a CUDA tensor of shape {fill.shape} and strides "
                f"{fill.strides}: its order depends on the strides of both; expected a row-major tensor to be filled: "
                "fill a contiguous one and copy, or use torch.bernoulli"
            )
        parameter = laid_out_as(local, parameter)
    if rule is None:
        return _whole(local, fill, state, device, parameter)
    rule = rule.at(n)
    parts = _leaves(rule, n, local.element_size(), state, device.launch)
    if isinstance(rule, GridStride) and not fill.is_dense and not fits_one_launch(fill.extent, local.element_size()):
        raise UnsupportedRandomOpError(
            f"{op.name} on a tensor of shape {fill.shape} and strides {fill.strides}: more than 2 GiB with holes between "
            "its elements; expected a dense tensor: fill a contiguous one and copy"
        )
    final = parts[-1].after(rule, device.launch)
    if region.numel == 0:
        return final
    if len(parts) == 1 and _prefers_kernel(rule, fill, local, device.launch):
        everything = list(spans(region, fill.order, local.stride(), n, n))
        if device.kernel(_cuda_kernel.NativeFill(op, rule, n, state), local, everything, parameter):
            return final
    if not isinstance(rule, ChunkedRule):
        return _whole(local, fill, state, device, parameter)
    longest = SCRATCH_CHUNKS * rule.chunk(device.launch)
    for span in spans(region, fill.order, local.stride(), longest, GAP_ELEMENTS):
        _fill_span(local, span, op, rule, parts, device)
    return final


def _prefers_kernel(rule: PhiloxRule, fill: Fill, local: torch.Tensor, launch: Launch) -> bool:
    """Whether writing a rank's elements one by one costs less than generating all whole chunks that contain some of them."""
    if not isinstance(rule, ChunkedRule) or fill.numel < launch.max_threads:
        return True
    swept = owned = 0
    longest = SCRATCH_CHUNKS * rule.chunk(launch)
    for span in spans(fill.region, fill.order, local.stride(), longest, GAP_ELEMENTS):
        if span.direct is None:
            swept += span.stop - span.start
            owned += sum(math.prod(piece.sizes) for piece in span.pieces)
    return owned * KERNEL_COST < swept


@dataclass(frozen=True)
class _Leaf:
    """Elements ``start .. stop`` of the stream, which one launch fills from ``state``."""

    start: int
    stop: int
    state: PhiloxState

    def after(self, rule: PhiloxRule, launch: Launch) -> PhiloxState:
        return PhiloxState(self.state.seed, self.state.offset + rule.increment(launch, self.stop - self.start))


def _leaves(rule: PhiloxRule, n: int, itemsize: int, state: PhiloxState, launch: Launch) -> list[_Leaf]:
    if not isinstance(rule, GridStride):  # dropout and tensor bernoulli count in 64 bits
        return [_Leaf(0, n, state)]
    cuts = list(leaves(n, itemsize))
    # The op first advances the offset as for one launch; then it splits, and each part advances it again.
    offset = state.offset + (rule.increment(launch, n) if len(cuts) > 1 else 0)
    found = []
    for start, stop in cuts:
        found.append(_Leaf(start, stop, PhiloxState(state.seed, offset)))
        offset += rule.increment(launch, stop - start)
    return found


def _fill_span(
    local: torch.Tensor, span: Span, op: RandomOp, rule: ChunkedRule, parts: Sequence[_Leaf], device: Device
) -> None:
    count = span.stop - span.start
    if span.direct is not None:
        out = local.as_strided((count,), (1,), local.storage_offset() + span.direct)
    else:
        out = torch.empty(count, dtype=local.dtype, device=local.device)
    for leaf in parts:
        start, stop = max(span.start, leaf.start), min(span.stop, leaf.stop)
        if start < stop:
            piece = out[start - span.start : stop - span.start]
            _fill_stretch(piece, start - leaf.start, leaf, op, rule, device)
    if span.direct is None:
        copy_out(span, out, local)


def _fill_stretch(out: torch.Tensor, start: int, leaf: _Leaf, op: RandomOp, rule: ChunkedRule, device: Device) -> None:
    """Elements ``start .. start + len(out)`` of a leaf."""
    n, launch = leaf.stop - leaf.start, device.launch

    def native(target: torch.Tensor, chunk: int) -> None:
        offset = leaf.state.offset + chunk * rule.chunk_increment()
        device.native(op, target, PhiloxState(leaf.state.seed, offset), None)

    if launch.threads(n) < launch.max_threads:  # less than a chunk: generating all of it costs less
        whole = torch.empty(n, dtype=out.dtype, device=out.device)
        native(whole, 0)
        out.copy_(whole[start : start + out.numel()])
        return
    chunk, stop = rule.chunk(launch), start + out.numel()
    position = start
    while position < stop:
        index = position // chunk
        whole_chunks = (stop - position) // chunk if position % chunk == 0 else 0
        if whole_chunks and rule.padded(chunk) == chunk:  # in place
            end = position + whole_chunks * chunk
            native(out[position - start : end - start], index)
        else:
            end = min(stop, (index + (SCRATCH_CHUNKS if rule.padded(chunk) != chunk else 1)) * chunk)
            scratch_chunks = -(-(end - index * chunk) // chunk)
            scratch = torch.empty(rule.padded(scratch_chunks * chunk), dtype=out.dtype, device=out.device)
            native(scratch, index)
            out[position - start : end - start] = scratch[position - index * chunk : end - index * chunk]
        position = end


def _whole(
    local: torch.Tensor, fill: Fill, state: PhiloxState, device: Device, parameter: torch.Tensor | None
) -> PhiloxState:
    """The fallback: every rank fills the whole tensor and keeps its part."""
    _warn_once(fill.op.name, local.dtype)
    final: list[PhiloxState] = []
    fill_from_whole(
        fill, local, parameter, lambda whole, arguments: device.native(fill.op, whole, state, arguments, final)
    )
    return final[0]


@functools.lru_cache(maxsize=64)
def _warn_once(name: str, dtype: torch.dtype) -> None:
    warnings.warn(
        f"torch {torch.__version__}: how {name} draws for {dtype} on CUDA is not known, or its kernel could not be "
        "built; every rank generates the whole tensor and keeps its part (correct, but slow and memory-intensive)",
        stacklevel=2,
    )


# --- Real devices


@functools.lru_cache(maxsize=16)
def device_at(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    launch = Launch(properties.multi_processor_count, properties.max_threads_per_multi_processor)
    kernels = _cuda_kernel.Kernels(launch, _native, functools.partial(_cuda_kernel.compiled, index))
    return Device(launch, _native, kernels.fill)


def _native(
    op: RandomOp,
    out: torch.Tensor,
    state: PhiloxState,
    parameter: torch.Tensor | None,
    final: list[PhiloxState] | None = None,
) -> None:
    generator = torch.Generator(out.device)
    write_state(generator, state)
    op.fill(out, generator, parameter)
    if final is not None:
        final.append(read_state(generator))


def read_state(generator: torch.Generator) -> PhiloxState:
    raw = generator.get_state().numpy().tobytes()
    if len(raw) != 16:
        raise GeneratorError(
            f"a CUDA generator state of {len(raw)} bytes; expected 16 (Philox seed and offset): this build of torch "
            "has a different generator; report it with `torch.__config__.show()`"
        )
    return PhiloxState(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))


def write_state(generator: torch.Generator, state: PhiloxState) -> None:
    raw = state.seed.to_bytes(8, "little") + state.offset.to_bytes(8, "little")
    generator.set_state(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


@functools.lru_cache(maxsize=1024)
def _check_arguments(op: RandomOp, dtype: torch.dtype, parameter_dtype: torch.dtype | None, index: int) -> None:
    """Raise what the native op raises for bad arguments; on every rank, also on one with an empty shard."""
    device = torch.device("cuda", index)
    parameter = None if parameter_dtype is None else torch.zeros(1, dtype=parameter_dtype, device=device)
    op.fill(torch.empty(1, dtype=dtype, device=device), torch.Generator(device), parameter)


class _RuleKey:
    """A cache key of (op, dtype, whether draws have 64 bits, device) that carries the arguments of the first use."""

    def __init__(self, op: RandomOp, dtype: torch.dtype, has_parameter: bool, index: int) -> None:
        self.op, self.dtype, self.has_parameter, self.index = op, dtype, has_parameter, index
        wide = op.name == "random_" and op.cpu_rule(dtype, 1, True)
        self.key = (op.name, op.dtype, op.name == DROPOUT_MASK and op.arguments[1], dtype, has_parameter, wide, index)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RuleKey) and self.key == other.key


@functools.lru_cache(maxsize=256)
def probed_rule(key: _RuleKey) -> PhiloxRule | None:
    """:func:`find_rule` on the real device, once for each op and dtype."""
    return find_rule(key.op, key.dtype, key.has_parameter, device_at(key.index), torch.device("cuda", key.index))


def find_rule(
    op: RandomOp, dtype: torch.dtype, has_parameter: bool, device: Device, where: torch.device
) -> PhiloxRule | None:
    """The rule by which an op draws on a device, found by comparison; None if no known rule gives the native bits."""
    if has_parameter:
        return Quads()  # checked by the kernel's own comparison with the native op
    state = PhiloxState(2**40 + 7, 8)
    rules: tuple[ChunkedRule, ...] = (GridStride(4), GridStride(2))
    if op.name == DROPOUT_MASK:
        assert op.dtype is not None
        widest = 16 // op.dtype.itemsize
        # The narrower vector first: two of its chunks look like one chunk of the wider vector.
        rules = tuple(Vectors(width) for width in sorted({min(widest, 4), widest}))
        rules = (Vectors(1),) if op.arguments[1] else rules
    op = op.telling(dtype)
    for rule in rules:
        # Two whole chunks and some elements, compared from the middle on.
        n = 2 * rule.chunk(device.launch) + 8 * 37  # the widest vector divides it
        whole = torch.empty(n, dtype=dtype, device=where)
        final: list[PhiloxState] = []
        device.native(op, whole, state, None, final)
        if final[0].offset != state.offset + rule.increment(device.launch, n):
            continue
        part = torch.empty(n - n // 2, dtype=dtype, device=where)
        _fill_stretch(part, n // 2, _Leaf(0, n, state), op, rule, device)
        if torch.equal(_comparable(part), _comparable(whole[n // 2 :])):
            return rule
    return None


def _comparable(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num() if values.is_floating_point() else values
