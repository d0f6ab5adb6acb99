"""The CUDA engine: fills a rank's part of a tensor with the native op on whole chunks, or with a kernel of this package.

A chunk is what all threads of the device write in one pass. If the generator's offset is advanced to a chunk, the native op
writes exactly the elements of the chunks that follow, so that nothing has to be known about the distribution;
:mod:`vescale.rng._philox` computes the chunks. Shards of inner dims have pieces in every chunk: these, and fills of fewer
elements than the device has threads, are written element by element by the kernel after it has given
the native bits on this device. If the checks recognize neither, the whole tensor is generated.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vescale import csrc
from vescale.compat.cuda_kernels import compile_kernel
from vescale.errors import GeneratorError, RandomOpError, UnsupportedRandomOpError
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
from vescale.rng._random_ops import DROPOUT_MASK, Fill, RandomOp, copy_out, fill_from_whole, laid_out_as
from vescale.rng._stream_spans import Piece, Span, spans

# A kernel that writes any elements of a random fill: for shards of inner dims and for fills of few elements.
#
# The source is ``vescale/csrc/philox.h``, compiled on first use. For each op, dtype and set of arguments, the kernel is
# compared once with the native op on the device before it is used. If it cannot be built, or if its bits differ, the caller
# falls back to native chunks.


_MAX_DIMS = 6
_DTYPES = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.uint8: 4,
    torch.bool: 4,
    torch.int8: 5,
    torch.int16: 6,
    torch.int32: 7,
    torch.int64: 8,
}
_UNIFORM, _NORMAL, _LOG_NORMAL, _EXPONENTIAL, _CAUCHY, _BELOW, _BELOW_PARAMETER, _MODULO, _FULL = range(9)
_GRID_STRIDE, _VECTORS, _QUADS = range(3)
# All integers from 0 to this one are exact; native ops change larger bounds.
_EXACT_INTEGERS = {torch.float64: 2**53, torch.float32: 2**24, torch.float16: 2**11, torch.bfloat16: 2**8}

_UNIT = 4  # adjacent elements that a thread writes together if the elements of one Philox block are passes apart
_NARROW = 2**31  # element numbers below fit into 32 bits, and divide by a multiplication
_THREADS = 256  # of a block of the kernel
_MAX_LAUNCHES = 64  # for one fill; with more, native chunks cost less

_DEVICE_SOURCE = """
#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define COUNT_BLOCK
#define FAST_LOG __logf
#define FAST_EXP __expf
#define FAST_TAN __tanf
#define FAST_SINCOS __sincosf
#define SINCOSPI sincospi
{header}
extern "C" __global__ void __launch_bounds__({threads})
vescale_fill(void* out, const void* parameter, const __grid_constant__ Plan plan) {{
  typedef {index} Index;
  const Kind kind = {{{kind}}};
  Index step = (Index)gridDim.x * blockDim.x;
  for (Index index = blockIdx.x * (Index)blockDim.x + threadIdx.x; index < (Index)plan.count; index += step)
    fill_unit(out, parameter, plan, kind, index);
}}
"""


class _Divisor(ctypes.Structure):
    _fields_ = [("value", ctypes.c_uint64), ("multiplier", ctypes.c_uint32), ("shift", ctypes.c_uint32)]


class Kind(NamedTuple):
    """The key of a compiled kernel: everything that all launches for an op, dtype and rule share."""

    rule: int
    lanes: int
    width: int
    transform: int
    dtype: int
    parameter_dtype: int
    narrow: int


class Plan(ctypes.Structure):
    """The kernel's parameters for one piece; ``philox.h`` describes the fields."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("seed", "block", "count", "stream")),
        *((name, ctypes.c_int64) for name in ("local", "a", "b", "c")),
        *((name, _Divisor) for name in ("threads", "units")),
        *((name, _Divisor * _MAX_DIMS) for name in ("sizes", "stream_strides")),
        ("local_strides", ctypes.c_int64 * _MAX_DIMS),
        ("dims", ctypes.c_int64),
        ("kind", ctypes.c_int * len(Kind._fields)),
    ]


# Fills one piece: (first element of the tensor, of the parameter, plan, blocks, threads of a block).
Launcher = Callable[[torch.Tensor, torch.Tensor, Plan, int, int], None]


@functools.cache
def compiled(index: int, kind: Kind) -> Launcher | None:
    """A kernel on CUDA device ``index``, which is the current one; None, with a warning, if it cannot be built."""
    try:
        return build(kind)
    except Exception as error:  # the engine falls back to native chunks
        _warn_not_built(index, f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _warn_not_built(index: int, reason: str) -> None:
    warnings.warn(
        f"the kernel of vescale.rng could not be built for cuda:{index} ({reason}); shards of inner dims are copied "
        "from native fills, which also generate the elements in between: the values are the same, but it is slower",
        stacklevel=2,
    )


def source(kind: Kind) -> str:
    """The source of a kernel for NVRTC; it includes no headers."""
    header = (Path(csrc.__file__).parent / "philox.h").read_text()
    index = "u32" if kind.narrow else "u64"
    return _DEVICE_SOURCE.format(header=header, threads=_THREADS, index=index, kind=", ".join(map(str, kind)))


def build(kind: Kind) -> Launcher:
    """Compile a kernel for the current device. Raises what :func:`vescale.compat.cuda_kernels.compile_kernel` raises."""
    kernel = compile_kernel(source(kind), "vescale_fill")

    def launch(out: torch.Tensor, parameter: torch.Tensor, plan: Plan, blocks: int, threads: int) -> None:
        pointers = ctypes.c_void_p(out.data_ptr()), ctypes.c_void_p(parameter.data_ptr())
        kernel(blocks, threads, *pointers, plan)

    return launch


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


class Transform(NamedTuple):
    """How the kernel computes a value from random words: the formula and its constants (doubles as their bits)."""

    number: int
    a: int = 0
    b: int = 0
    c: int = 0


def transform_of(op: RandomOp, dtype: torch.dtype, has_parameter: bool) -> Transform | None:
    """The formula of an op, or None for ops and arguments that the kernel does not know."""
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32

    def numbers(*values: float | int | None) -> list[int]:
        return [_bits(_rounded(float(value or 0.0), accumulated)) for value in values]

    match op.name, op.arguments:
        case "uniform_", (low, high):
            start, stop = (torch.tensor(float(bound or 0.0), dtype=torch.float64).to(dtype) for bound in (low, high))
            return Transform(_UNIFORM, _bits(start.item()), _bits(stop.item()), _bits((stop - start).item()))
        case "normal_", (mean, std):
            return Transform(_NORMAL, *numbers(mean, std))
        case "log_normal_", (mean, std):
            return Transform(_LOG_NORMAL, *numbers(mean, std))
        case "exponential_", (rate,):
            return Transform(_EXPONENTIAL, *numbers(rate))
        case "cauchy_", (median, sigma):
            return Transform(_CAUCHY, *numbers(median, sigma))
        case "bernoulli_", () if has_parameter:
            return Transform(_BELOW_PARAMETER)
        case "bernoulli_", (p,):
            return Transform(_BELOW, *numbers(p))
        case name, (p, _) if name == DROPOUT_MASK:
            keep = 1.0 - float(p or 0.0)
            return Transform(
                _BELOW, _bits(_rounded(keep, torch.float64 if op.dtype == torch.float64 else torch.float32))
            )
        case "random_", ():
            return Transform(_MODULO, 0, _signed(_num_values(dtype)))
        case "random_", (int(low), None):
            return Transform(_FULL) if low == -(2**63) else _between(low, _num_values(dtype), dtype)
        case "random_", (int(low), int(high)):
            return _between(low, high, dtype)
        case "random_", (int(high),):
            return _between(0, high, dtype)
    return None


def _between(low: int, high: int, dtype: torch.dtype) -> Transform | None:
    limit = _EXACT_INTEGERS.get(dtype)
    if limit is not None and (low < -limit or high > limit + 1):
        return None
    return Transform(_MODULO, low, _signed(high - low))


def _num_values(dtype: torch.dtype) -> int:
    """The number of values of ``random_()`` without bounds: from 0 to the largest integer that is exact."""
    if dtype == torch.bool:
        return 2
    return _EXACT_INTEGERS[dtype] + 1 if dtype in _EXACT_INTEGERS else torch.iinfo(dtype).max + 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _divisor(value: int) -> _Divisor:
    """Division by a multiplication, for dividends below 2^31 (Granlund and Montgomery 1994)."""
    shift = max(0, (value - 1).bit_length())
    multiplier = (2**32 * (2**shift - value)) // max(value, 1) + 1
    return _Divisor(value, multiplier % 2**32, shift)


@dataclass(frozen=True)
class NativeFill:
    """A fill of ``n`` elements as the native op makes it: by ``rule``, from a generator in ``state``."""

    op: RandomOp
    rule: PhiloxRule
    n: int
    state: PhiloxState


def plan_of(
    fill: NativeFill,
    launch: Launch,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | None,
    span: Span,
    piece: Piece,
) -> Plan | None:
    """The kernel's parameters for one piece; None for ops that it does not implement, and if the piece is no box of few
    dims."""
    rule, n, transform = fill.rule, fill.n, transform_of(fill.op, dtype, parameter_dtype is not None)
    if transform is None:
        return None
    if isinstance(rule, Vectors) and rule.width == 1:
        rule = GridStride(4)
    sizes, strides, locals_ = piece.sizes, piece.span_strides, piece.local_strides
    nested = all(inner * size <= outer for outer, inner, size in zip(strides, strides[1:], sizes[1:], strict=False))
    if len(sizes) > _MAX_DIMS or strides[-1:] != (1,) or not nested or dtype not in _DTYPES:
        return None
    threads = launch.threads(n)
    match rule:
        case GridStride(unroll):
            number, lanes, width, units = _GRID_STRIDE, unroll, unroll, -(-sizes[-1] // _UNIT)
        case Vectors(width):
            number, lanes = _VECTORS, min(width, 4)
            units = (sizes[-1] + lanes - 2) // lanes + 1  # of the blocks that a run may touch, wherever it starts
        case _:
            number, lanes, width = _QUADS, 4, 4
            units = (sizes[-1] + lanes - 2) // lanes + 1
    # An upper bound of the element numbers, including those that are searched for and do not exist.
    narrow = n + 4 * (threads + _UNIT) < _NARROW
    parameter_number = _DTYPES.get(parameter_dtype or torch.float32, 0)
    kind = Kind(number, lanes, width, transform.number, _DTYPES[dtype], parameter_number, int(narrow))

    def divisors(values: Sequence[int]) -> Any:
        return (_Divisor * _MAX_DIMS)(*(_divisor(value) for value in values))

    return Plan(
        seed=fill.state.seed,
        block=fill.state.offset // 4,
        count=math.prod(sizes[:-1]) * units,
        stream=span.start + piece.span_offset,
        local=piece.local_offset,
        a=transform.a,
        b=transform.b,
        c=transform.c,
        threads=_divisor(threads),
        units=_divisor(units),
        sizes=divisors(sizes),
        stream_strides=divisors(strides),
        local_strides=(ctypes.c_int64 * _MAX_DIMS)(*locals_),
        dims=len(sizes),
        kind=(ctypes.c_int * len(kind))(*kind),
    )


class Kernels:
    """The kernels of one device, and the results of their comparisons with the native op.

    ``native``: as in ``Device``. ``build(kind)`` returns a launcher, or None if the kernel cannot be built.
    """

    def __init__(self, launch: Launch, native: Callable[..., None], build: Callable[[Kind], Launcher | None]) -> None:
        self.launch, self.native, self.build = launch, native, build
        self._trusted: dict[Any, bool] = {}

    def fill(
        self, fill: NativeFill, local: torch.Tensor, spans: Sequence[Span], parameter: torch.Tensor | None
    ) -> bool:
        """Fill the pieces of the spans with the native bits. Returns False, with nothing written, if the kernel cannot be
        used."""
        if isinstance(fill.rule, ChunkedRule) and sum(len(span.pieces) for span in spans) > _MAX_LAUNCHES:
            return False
        return self.trusts(fill.op, fill.rule, local, parameter) and self._fill(fill, local, spans, parameter)

    def trusts(self, op: RandomOp, rule: PhiloxRule, local: torch.Tensor, parameter: torch.Tensor | None) -> bool:
        """Whether the kernel gives the native bits, for the op in general and with these arguments.

        Each comparison is made once.
        """
        general = op.telling(local.dtype)
        return self._passes(general, rule, local, parameter, 8 * self.launch.max_threads + 8 * 5) and (
            general == op or self._passes(op, rule, local, parameter, 8 * 777)
        )

    def _passes(
        self, op: RandomOp, rule: PhiloxRule, local: torch.Tensor, parameter: torch.Tensor | None, numel: int
    ) -> bool:
        key = (op, local.dtype, rule, None if parameter is None else parameter.dtype, numel)
        if key not in self._trusted:
            self._trusted[key] = transform_of(op, local.dtype, parameter is not None) is not None and all(
                self._equals_native(op, rule, local, parameter, n) for n in sorted({8 * 777, numel})
            )
        return self._trusted[key]

    def _fill(
        self, fill: NativeFill, local: torch.Tensor, spans: Sequence[Span], parameter: torch.Tensor | None
    ) -> bool:
        parameter_dtype = None if parameter is None else parameter.dtype
        launches = []
        for span in spans:
            for piece in span.pieces:
                plan = plan_of(fill, self.launch, local.dtype, parameter_dtype, span, piece)
                kernel = None if plan is None else self.build(Kind(*plan.kind))
                if plan is None or kernel is None:
                    return False
                launches.append((kernel, plan))
        # The kernel counts from the first element of the storage's view that it is given.
        out = local.as_strided((1,), (1,), local.storage_offset())
        given = out if parameter is None else parameter.as_strided((1,), (1,), parameter.storage_offset())
        most = 8 * self.launch.max_threads // _THREADS  # several units a thread
        for kernel, plan in launches:
            kernel(out, given, plan, min(-(-plan.count // _THREADS), most), _THREADS)
        return True

    def _equals_native(
        self, op: RandomOp, rule: PhiloxRule, local: torch.Tensor, parameter: torch.Tensor | None, n: int
    ) -> bool:
        """Compare one fill: all of it, and a part of every row, whose Philox blocks have elements that are not written."""
        state = PhiloxState(2**40 + 11, 16)
        n = rule.padded(n) if isinstance(rule, ChunkedRule) else n
        probabilities = None
        if parameter is not None:
            probabilities = torch.linspace(0, 1, n, dtype=torch.float64, device=local.device).to(parameter.dtype)
        native = torch.empty(n, dtype=local.dtype, device=local.device)
        self.native(op, native, state, probabilities)
        own = torch.empty_like(native)
        columns, first, last = 61, 7, 40
        rows, width = n // columns, last - first
        whole = Piece((n,), 0, (1,), 0, (1,))
        part = Piece((rows, width), first, (columns, 1), first, (columns, 1))
        for piece, view in ((whole, (n,)), (part, (rows, width))):
            own.zero_()
            if not self._fill(NativeFill(op, rule, n, state), own, [Span(0, n, (piece,))], probabilities):
                return False
            found, expected = (
                values.as_strided(view, piece.local_strides, piece.local_offset) for values in (own, native)
            )
            if not torch.equal(found, expected):
                return False
        return True


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
        if device.kernel(NativeFill(op, rule, n, state), local, everything, parameter):
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
    kernels = Kernels(launch, _native, functools.partial(compiled, index))
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
