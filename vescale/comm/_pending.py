"""What all collectives have in common: a result that is waited for, memory as bytes, operations, who moves a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm._observation import wait_for_message

__all__ = [
    "GLOO_REDUCES",
    "REDUCE_OPS",
    "Messages",
    "Pending",
    "as_bytes",
    "is_gloo",
    "is_nccl",
    "moves_nothing",
    "reduce_rows",
]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,  # only NCCL's; gloo has none, so it sums and divides
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class Pending:
    """A collective in flight. ``out`` is the tensor that holds the result once ``wait()`` has returned it.

    ``finish`` is the local step that follows the collective (a reduction, a copy out of padding); it writes ``out``.
    """

    def __init__(self, out: torch.Tensor, works: Sequence[Any] = (), finish: Callable[[], Any] | None = None) -> None:
        self.out = out
        self._works = works
        self._finish = finish

    def wait(self) -> torch.Tensor:
        for work in self._works:
            if work is not None:
                work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._finish = (), None
        return self.out

    def works(self) -> list[Any]:
        """What :meth:`wait` is going to wait for, and drop. Who holds it longer holds the collective's tensors.

        The last one to let go of these needs the interpreter's lock (torch 2.13 counts references of Python tensors in C++).
        If that is a thread of gloo, late, and the interpreter is ending, the process aborts.
        """
        nested = [work.works() if isinstance(work, Pending) else [work] for work in self._works]
        return [work for works in nested for work in works]

    def is_completed(self) -> bool:
        """Whether ``wait()`` is known to return without waiting for another rank; of messages it never is: do not poll."""
        return all(work is None or work.is_completed() for work in self._works)

    def reshaped(self, out: torch.Tensor) -> Pending:
        """The same collective, whose result is seen through another view of its memory."""
        return Pending(out, [self])


class Messages(Pending):
    """Messages in flight. Whether they have arrived is not known before they have been waited for."""

    def wait(self) -> torch.Tensor:
        for work in self._works:
            wait_for_message(work)
        self._works = ()  # a message that has been waited for would be waited for in vain
        return self.out


# What gloo's own all_reduce takes, without the half precisions, which it would add up in half precision.
GLOO_REDUCES = frozenset(
    {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64}
)


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous flat tensor."""
    assert flat.is_contiguous(), "a tensor with gaps would be read, or written, beside its elements"
    if flat.numel() < 2:
        flat = flat.as_strided((flat.numel(),), (1,))  # its stride is arbitrary, but view() wants 1
    return flat.view(torch.uint8)


def is_nccl(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group moves this tensor by NCCL; a group may have one backend for each device type."""
    return tensor.is_cuda and dist.Backend.NCCL in dist.get_backend_config(group)


def is_gloo(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether the group moves this tensor, on a CPU, by gloo."""
    return tensor.device.type == "cpu" and dist.Backend.GLOO in dist.get_backend_config(group)


def moves_nothing(group: dist.ProcessGroup) -> bool:
    """Whether the group only pretends to communicate: benchmarks measure the rest alone."""
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

    In pairs, and pairs of pairs, whose rounding errors grow with the logarithm of the number of ranks; half precision one
    after the other in float32.
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
