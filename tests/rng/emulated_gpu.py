"""A GPU of the research that the CUDA engine rests on, emulated on the CPU: native ops, kernel launches, generators.

The "native" ops follow the launches of ATen's CUDA kernels (grid, block, unroll, increments of the offset) with the values
of the host build of ``vescale/csrc/philox.h``; those that it does not know hold their random word instead. What the engine
makes of them is right or wrong as on a GPU; whether a GPU does the same as this emulation only a GPU can tell.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from tests.rng import cases
from vescale import csrc
from vescale.rng._cuda_engine import Device, Kernels, NativeFill, Plan, plan_of
from vescale.rng._philox import GridStride, Launch, PhiloxRule, PhiloxState, Quads, Vectors, philox
from vescale.rng._random_ops import DROPOUT_MASK, RandomOp
from vescale.rng._stream_spans import Piece, Span

__all__ = ["COINS", "NORMAL", "SMALL", "STATE", "UNIFORM", "EmulatedGpu", "host_launcher", "no_kernel"]

SMALL = Launch(num_sms=2, threads_per_sm=512)  # 1,024 threads
STATE = PhiloxState(seed=2**35 + 99, offset=24)
UNIFORM, NORMAL, COINS = cases.OPS["uniform"], cases.OPS["normal"], RandomOp("bernoulli_")


def no_kernel(*_: Any) -> bool:
    return False


def host_launcher() -> Any:
    """The kernel's launcher for CPU tensors, or None when the helper was not built."""
    library = csrc.load("philox")
    if library is None:
        return None
    library.philox_fill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(Plan)]
    library.philox_plan_bytes.restype = ctypes.c_uint64
    assert library.philox_plan_bytes() == ctypes.sizeof(Plan)

    def kernel(out: torch.Tensor, parameter: torch.Tensor, plan: Plan, blocks: int, threads: int) -> None:
        library.philox_fill(out.data_ptr(), parameter.data_ptr(), plan)

    return kernel


class EmulatedGpu:
    """``device``: what the engine is given. ``calls``: the numbers of elements of native calls; ``launches``: of kernels."""

    def __init__(self, launch: Launch, with_kernel: bool = True) -> None:
        self.launch = launch
        self.calls: list[int] = []
        self.launches: list[int] = []
        self._host = host_launcher()
        kernels = Kernels(launch, self.native, lambda kind: self._launch if with_kernel else None)
        self.device = Device(launch, self.native, kernels.fill)

    def _launch(self, out: torch.Tensor, parameter: torch.Tensor, plan: Plan, blocks: int, threads: int) -> None:
        self.launches.append(plan.count)
        self._host(out, parameter, plan, blocks, threads)

    def native_rule(self, op: RandomOp, dtype: torch.dtype, n: int, has_parameter: bool) -> PhiloxRule:
        if has_parameter:
            return Quads()
        if op.name == DROPOUT_MASK:
            assert op.dtype is not None
            return Vectors(1) if op.arguments[1] else Vectors(16 // op.dtype.itemsize).at(n)
        wide = op.cpu_rule(dtype, n, True).words == 2 if op.name == "random_" else dtype == torch.float64  # type: ignore[union-attr]
        return GridStride(2 if wide else 4)

    def native(
        self,
        op: RandomOp,
        out: torch.Tensor,
        state: PhiloxState,
        parameter: torch.Tensor | None,
        final: list[PhiloxState] | None = None,
    ) -> None:
        n = out.numel()
        self.calls.append(n)
        rule = self.native_rule(op, out.dtype, n, parameter is not None)
        if n:
            order = sorted(range(out.dim()), key=lambda dim: -out.stride(dim))
            stream = torch.empty(n, dtype=out.dtype)
            along = None if parameter is None else parameter.permute(order).reshape(-1).contiguous()
            self._values(op, rule, stream, state, along)
            inverse = sorted(range(len(order)), key=order.__getitem__)
            out.copy_(stream.view([out.shape[dim] for dim in order]).permute(inverse))
        if final is not None:
            final.append(PhiloxState(state.seed, state.offset + rule.increment(self.launch, n)))

    def _values(
        self, op: RandomOp, rule: PhiloxRule, stream: torch.Tensor, state: PhiloxState, parameter: torch.Tensor | None
    ) -> None:
        n = stream.numel()
        span = Span(0, n, (Piece((n,), 0, (1,), 0, (1,)),))
        fill, dtype = NativeFill(op, rule, n, state), None if parameter is None else parameter.dtype
        plan = plan_of(fill, self.launch, stream.dtype, dtype, span, span.pieces[0])
        if plan is None:
            thread, block, lane = rule.address(self.launch, n, np.arange(n))
            words = philox(state, thread, block)[np.arange(n), lane]
            stream.copy_(torch.from_numpy((words % 251).astype(np.int64)))
            return
        self._host(stream, stream if parameter is None else parameter, plan, 1, 1)
