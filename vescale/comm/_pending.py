"""``Pending``, the handle of a collective, and helpers of all collectives: memory as bytes, reductions, backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm._long_waits import wait_for_work
from vescale.comm._observation import wait_for_message

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,  # NCCL only; on gloo a sum is divided
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Pending:
    """A collective in flight. After ``wait()``, the tensor ``out`` holds the result.

    ``finish`` is the local step after the collective (a reduction, a copy out of padding); it writes ``out``.
    """

    def __init__(self, out: torch.Tensor, works: Sequence[Any] = (), finish: Callable[[], Any] | None = None) -> None:
        self.out = out
        self._works = works
        self._finish = finish

    def wait(self) -> torch.Tensor:
        for work in self._works:
            if work is not None:
                wait_for_work(work, self.out)
        if self._finish is not None:
            self._finish()
        self._works, self._finish = (), None
        return self.out

    def is_completed(self) -> bool:
        """Whether ``wait()`` is known to return at once; never True for messages: do not poll."""
        return all(work is None or work.is_completed() for work in self._works)

    def reshaped(self, out: torch.Tensor) -> Pending:
        """The same collective with its result in another view of its memory."""
        return Pending(out, [self])


class Messages(Pending):
    """Messages in flight. Their arrival cannot be observed before they have been waited for."""

    def wait(self) -> torch.Tensor:
        for work in self._works:
            wait_for_message(work)
        self._works = ()  # waiting twice for a message would block
        return self.out


# The dtypes of gloo's all_reduce, without half precision, in which it would accumulate in half precision.
GLOO_REDUCES = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64}
)


def one_reduction(
    op: str, dtype: torch.dtype, device_type: str, group: dist.ProcessGroup
) -> tuple[dist.ReduceOp.RedOpType, int] | None:
    """The op of one all-reduce and what to divide its result by; None where the backend would lose precision or fails."""
    if uses_nccl(device_type, group):
        return REDUCE_OPS[op], 1
    if dtype not in GLOO_REDUCES:
        return None
    return (REDUCE_OPS["sum"], dist.get_world_size(group)) if op == "avg" else (REDUCE_OPS[op], 1)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor."""
    assert flat.is_contiguous(), "a tensor with gaps would be read, or written, beside its elements"
    if flat.numel() < 2:
        flat = flat.as_strided((flat.numel(),), (1,))  # its stride is arbitrary, but view() wants 1
    return flat.view(torch.uint8)


def is_nccl(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group uses NCCL for this tensor; a group may have one backend for each device type."""
    return uses_nccl(tensor.device.type, group)


def uses_nccl(device_type: str, group: dist.ProcessGroup) -> bool:
    """Whether the group uses NCCL for tensors on such a device."""
    return device_type != "cpu" and dist.Backend.NCCL in dist.get_backend_config(group)


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group uses gloo for this tensor, which is on a CPU."""
    return tensor.device.type == "cpu" and dist.Backend.GLOO in dist.get_backend_config(group)


def moves_nothing(group: dist.ProcessGroup) -> bool:
    """Whether the group's backend is fake; benchmarks use it to measure everything else."""
    return bool(dist.get_backend(group) == "fake")


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def reduce_rows(rows: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Reduce ``rows``, one of each rank, into ``out``, which may be one of them; the others are undefined afterwards.

    In pairs, and pairs of pairs, so that rounding errors grow with the logarithm of the number of ranks; half precision
    sequentially in float32.
    """
    combine = _COMBINE[op]
    if out.dtype in (torch.float16, torch.bfloat16):
        result = rows[0].float()
        for row in rows[1:]:
            combine(result, row, out=result)
    elif len(rows) == 1:
        result = out.copy_(rows[0])
    else:
        left = list(rows)
        while len(left) > 2:
            for first, second in zip(left[::2], left[1::2]):
                combine(first, second, out=first)
            left = left[::2]
        result = combine(*left, out=out)
    if op == "avg":
        result.div_(len(rows))
    if result is not out:
        out.copy_(result)
