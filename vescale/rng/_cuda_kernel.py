"""A kernel that writes any elements of a random fill: for shards of inner dims and for fills of few elements.

The source is ``vescale/csrc/philox.h``, compiled on first use. For each op, dtype and set of arguments, the kernel is
compared once with the native op on the device before it is used. If it cannot be built, or if its bits differ, the caller
falls back to native chunks.
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
from vescale.rng._philox import ChunkedRule, GridStride, Launch, PhiloxRule, PhiloxState, Vectors
from vescale.rng._random_ops import DROPOUT_MASK, RandomOp
from vescale.rng._stream_spans import Piece, Span

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
        _warn_once(index, f"{type(error).__name__}: {error}")
        return None


@functools.cache
def _warn_once(index: int, reason: str) -> None:
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
