"""A kernel of our own that makes any elements of a random fill: for inner-dim shards, and fills of few elements.

The source is ``vescale/csrc/philox.h``, compiled on first use. For each op and dtype it is compared with the native op
on the device, once, before it is used; where it cannot be built or its bits differ, the caller's slower way serves.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from vescale import csrc
from vescale.compat.kernels import compile_kernel
from vescale.rng._ops import DROPOUT_MASK, RandomOp
from vescale.rng._philox import ChunkedRule, GridStride, Launch, PhiloxRule, PhiloxState, Quads, Vectors
from vescale.rng._spans import Piece, Span

__all__ = ["Kernels", "build", "compiled", "launch_plan", "transform_of"]

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
_UNIFORM, _NORMAL, _BELOW, _BELOW_PARAMETER, _MODULO, _FULL = range(6)

_NARROW = 2**31  # elements whose numbers, and a grid beyond them, fit into 32 bits
_COUNT = 2  # its place in a launch plan
_THREADS = 256  # of a block
_MAX_LAUNCHES = 64  # for one fill; beyond, sweeping over whole chunks costs less

_DEVICE_SOURCE = """
#define DEVICE static __device__ __forceinline__
#define FAST_SINCOS __sincosf
#define SINCOSPI sincospi
{header}
extern "C" __global__ void vescale_fill(void* __restrict__ out, const void* parameter, const i64* __restrict__ plan) {{
  u64 first = blockIdx.x * (u64)blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x, count = (u64)plan[kCount];
  if (plan[kNarrow]) {{
    for (u32 index = (u32)first; index < (u32)count; index += (u32)step) fill_element(out, parameter, plan, index);
  }} else {{
    for (u64 index = first; index < count; index += step) fill_element(out, parameter, plan, index);
  }}
}}
"""


@functools.cache
def compiled(index: int) -> Callable[..., Any] | None:
    """The launcher of the kernel on CUDA device ``index``, which is the current one; None where it cannot be built."""
    try:
        return build()
    except Exception:  # whatever is missing: the engine has another way
        return None


def build() -> Callable[..., Any]:
    """Compile the kernel for the current device. Raises what :func:`vescale.compat.kernels.compile_kernel` raises."""
    header = (Path(csrc.__file__).parent / "philox.h").read_text()
    return compile_kernel(_DEVICE_SOURCE.format(header=header), "vescale_fill")


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def transform_of(op: RandomOp, dtype: torch.dtype, has_parameter: bool) -> tuple[int, int, int, int] | None:
    """(transform, a, b, c) of the kernel for an op, or None for the ops that it does not know."""
    match op.name, op.arguments:
        case "uniform_", (low, high):
            low, high = float(low or 0.0), float(high or 0.0)
            start, stop = _rounded(low, dtype), _rounded(high, dtype)
            return _UNIFORM, _bits(start), _bits(stop), _bits(_rounded(stop - start, dtype))
        case "normal_", (mean, std):
            accumulate = torch.float64 if dtype == torch.float64 else torch.float32
            numbers = [_bits(_rounded(float(value or 0.0), accumulate)) for value in (mean, std)]
            return _NORMAL, numbers[0], numbers[1], 0
        case "bernoulli_", () if has_parameter:
            return _BELOW_PARAMETER, 0, 0, 0
        case "bernoulli_", (p,):
            return _BELOW, _bits(_rounded(float(p or 0.0), dtype if dtype == torch.float64 else torch.float32)), 0, 0
        case name, (p, _) if name == DROPOUT_MASK:
            keep = 1.0 - float(p or 0.0)
            return _BELOW, _bits(_rounded(keep, torch.float64 if op.dtype == torch.float64 else torch.float32)), 0, 0
        case "random_", (int(low), int(high)):
            return _MODULO, low, high - low, 0
        case "random_", (int(high),):
            return _MODULO, 0, high, 0
    return None


def launch_plan(
    transform: tuple[int, int, int, int],
    rule: PhiloxRule,
    launch: Launch,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype | None,
    span: Span,
    piece: Piece,
    n: int,
    state: PhiloxState,
) -> list[int] | None:
    """The integers that tell the kernel about one piece; None when it has too many dims."""
    if isinstance(rule, Vectors) and rule.width == 1:
        rule = GridStride(4)
    narrow = int(n < _NARROW)
    kind = {GridStride: 0, Vectors: 1, Quads: 2}[type(rule)]
    width = rule.unroll if isinstance(rule, GridStride) else rule.width if isinstance(rule, Vectors) else 4
    if len(piece.sizes) > _MAX_DIMS or dtype not in _DTYPES:
        return None
    pad = [0] * (_MAX_DIMS - len(piece.sizes))
    seed = state.seed - 2**64 if state.seed >= 2**63 else state.seed
    return [
        *(seed, state.offset // 4, math.prod(piece.sizes), kind, launch.threads(n), width, transform[0]),
        *(_DTYPES[dtype], _DTYPES.get(parameter_dtype or torch.float32, 0), *transform[1:]),
        *(span.start + piece.span_offset, piece.local_offset, len(piece.sizes), narrow),
        *(*piece.sizes, *pad, *piece.span_strides, *pad, *piece.local_strides, *pad),
    ]


class Kernels:
    """The kernels of one device, and what is known about their bits.

    ``native``: as in ``Device``. ``build()``: a launcher ``kernel(grid=, block=, args=[out, parameter, plan])`` or None.
    """

    def __init__(
        self, launch: Launch, native: Callable[..., None], build: Callable[[], Callable[..., Any] | None]
    ) -> None:
        self.launch, self.native, self.build = launch, native, build
        self._trusted: dict[Any, bool] = {}

    def fill(
        self,
        op: RandomOp,
        rule: PhiloxRule,
        local: torch.Tensor,
        spans: Sequence[Span],
        n: int,
        state: PhiloxState,
        parameter: torch.Tensor | None,
    ) -> bool:
        """Fills the pieces of the spans with the native bits; False, and nothing done, when another way must be found."""
        if isinstance(rule, ChunkedRule) and sum(len(span.pieces) for span in spans) > _MAX_LAUNCHES:
            return False
        return self.trusts(op, rule, local, parameter) and self._fill(op, rule, local, spans, n, state, parameter)

    def trusts(self, op: RandomOp, rule: PhiloxRule, local: torch.Tensor, parameter: torch.Tensor | None) -> bool:
        """Whether the kernel gave the native bits when it was first asked for such a fill."""
        if transform_of(op, local.dtype, parameter is not None) is None:
            return False
        key = (op.name, op.dtype, len(op.arguments), local.dtype, rule, None if parameter is None else parameter.dtype)
        if key not in self._trusted:
            probes = {op, op.telling(local.dtype)}
            self._trusted[key] = all(self._equals_native(probe, rule, local, parameter) for probe in probes)
        return self._trusted[key]

    def _fill(
        self,
        op: RandomOp,
        rule: PhiloxRule,
        local: torch.Tensor,
        spans: Sequence[Span],
        n: int,
        state: PhiloxState,
        parameter: torch.Tensor | None,
    ) -> bool:
        transform = transform_of(op, local.dtype, parameter is not None)
        kernel = None if transform is None else self.build()
        if kernel is None or transform is None:
            return False
        parameter_dtype = None if parameter is None else parameter.dtype
        plans = []
        for span in spans:
            for piece in span.pieces:
                plan = launch_plan(transform, rule, self.launch, local.dtype, parameter_dtype, span, piece, n, state)
                if plan is None:
                    return False
                plans.append(plan)
        if not plans:
            return True
        # The kernel counts from the first element of the storage's view that it is given.
        out = local.as_strided((1,), (1,), local.storage_offset())
        given = out if parameter is None else parameter.as_strided((1,), (1,), parameter.storage_offset())
        tables = torch.tensor(plans, dtype=torch.int64, device=local.device)
        # Several elements a thread, so that the plan is read once for all of them.
        most = 8 * self.launch.max_threads // _THREADS
        for plan, table in zip(plans, tables, strict=True):
            blocks = min(-(-plan[_COUNT] // _THREADS), most)
            kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[out, given, table])
        return True

    def _equals_native(
        self, op: RandomOp, rule: PhiloxRule, local: torch.Tensor, parameter: torch.Tensor | None
    ) -> bool:
        """Compares fills of few elements, and of several passes of all threads."""
        state = PhiloxState(2**40 + 11, 16)
        for n in (8 * 777, 8 * self.launch.max_threads + 8 * 5):
            n = rule.padded(n) if isinstance(rule, ChunkedRule) else n
            probabilities = None
            if parameter is not None:
                probabilities = torch.linspace(0, 1, n, dtype=torch.float64, device=local.device).to(parameter.dtype)
            native = torch.empty(n, dtype=local.dtype, device=local.device)
            self.native(op, native, state, probabilities)
            own = torch.empty_like(native)
            span = Span(0, n, (Piece((n,), 0, (1,), 0, (1,)),))
            if not self._fill(op, rule, own, [span], n, state, probabilities) or not torch.equal(own, native):
                return False
        return True
