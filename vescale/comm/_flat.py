"""Collectives over equal pieces that write where they are told to: what buffers of whole groups of tensors are moved by.

All tensors are flat and contiguous. Nothing is allocated for a result and, where the backend reduces by itself, nothing
at all. On gloo, whose own versions go through buffers as large as the result,

* an all-gather of few ranks is an exchange with each of them, in place (no second buffer, and less time);
* a reduce-scatter exchanges the contributions and adds them up on the receiver, in pairs of ranks, and half precision in
  float32 (a third of the time). Two ranks receive in the place of the result. More need memory for the other pieces while
  it runs, or (``at_once``) exchange rank by rank, each time into what they have sent before; that takes no memory, but
  each step waits for the one before, so that the call returns when all is done. Small pieces, and those of many ranks,
  are moved by one collective, which needs memory for one more input.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.profiler import record_function

from vescale.comm._ledger import record
from vescale.comm._pending import (
    GLOO_REDUCES,
    REDUCE_OPS,
    Pending,
    as_bytes,
    is_gloo,
    is_nccl,
    moves_nothing,
    reduce_rows,
)
from vescale.compat import all_gather_single, reduce_scatter_single

__all__ = ["all_gather_into", "all_reduce_", "reduce_scatter_into"]

_FEW_RANKS = 8
"""Up to here an all-gather is an exchange with each rank: 0.5 of the CPU time of gloo's own with 2 ranks at 3 MB, 0.9 with
4; the same at 64 KB. (A broadcast from each takes the same with 4 ranks at 3 MB, and up to twice as much otherwise.)"""

_LARGE_PIECE_BYTES = 1 << 18
"""From here a reduce-scatter of few ranks is an exchange with each one, too: 0.75 of the CPU time of one collective with 4
ranks and pieces of 800 KB, but 1.5 of it with 64 KB."""


def all_gather_into(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup, *, asker: str = "") -> Pending:
    """``out``: the ranks' pieces in rank order. In place when ``piece`` is its own slot of ``out``.

    Receives ``(n - 1) / n`` of ``out``.
    """
    if out.numel() == 0:
        return Pending(out)
    num_ranks = group.size()
    moved = (num_ranks - 1) * piece.numel() * piece.element_size()
    with record("all_gather_v", num_ranks, moved, asker=asker, group=group):
        if num_ranks <= _FEW_RANKS and is_gloo(out, group):
            return _all_gather_by_exchanges(out, piece, group)
        return Pending(out, [all_gather_single(as_bytes(out), as_bytes(piece), group=group, async_op=True)])


def _all_gather_by_exchanges(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """The own piece to the rank ``step`` places further on, and that of the rank as many places before to its slot."""
    rank, num_ranks = group.rank(), group.size()
    slots = out.view(num_ranks, -1)
    with torch.no_grad(), record_function("gloo:all_gather_by_exchanges"):
        if slots[rank].data_ptr() != piece.data_ptr():
            slots[rank].copy_(piece)
        works = [
            _exchange(
                slots[(rank - step) % num_ranks], piece, (rank - step) % num_ranks, (rank + step) % num_ranks, group
            )
            for step in range(1, num_ranks)
        ]
    return Pending(out, works)


def _exchange(out: torch.Tensor, send: torch.Tensor, source: int, target: int, group: dist.ProcessGroup) -> dist.Work:
    """``send`` to one rank of the group, and as much from another to ``out``."""
    num_bytes, ranks = out.numel() * out.element_size(), range(group.size())
    received, sent = [num_bytes * (r == source) for r in ranks], [num_bytes * (r == target) for r in ranks]
    return dist.all_to_all_single(as_bytes(out), as_bytes(send), received, sent, group=group, async_op=True)


def reduce_scatter_into(
    out: torch.Tensor,
    send: torch.Tensor,
    op: str,
    group: dist.ProcessGroup,
    *,
    asker: str = "",
    at_once: bool = False,
) -> Pending:
    """``out``: this rank's piece of the elementwise reduction of the ranks' ``send``. Sends ``(n - 1) / n`` of it.

    ``op`` is ``sum``, ``avg``, ``max``, ``min`` or ``product``. ``out`` is memory of its own or this rank's piece of
    ``send``, the rest of which is undefined afterwards. ``at_once`` must be the same on all ranks.
    """
    if send.numel() == 0:
        return Pending(out)
    num_ranks = group.size()
    moved = (num_ranks - 1) * out.numel() * out.element_size()
    with record("reduce_scatter_v", num_ranks, moved, asker=asker, group=group):
        if is_nccl(send, group) or moves_nothing(group):
            return Pending(out, [reduce_scatter_single(out, send, op=REDUCE_OPS[op], group=group, async_op=True)])
        pieces, rank = list(send.view(num_ranks, -1)), group.rank()
        is_large = num_ranks <= _FEW_RANKS and out.numel() * out.element_size() >= _LARGE_PIECE_BYTES
        in_steps = at_once or num_ranks == 2 or (is_large and is_gloo(send, group))
        if num_ranks == 1 or (in_steps and out.data_ptr() != pieces[rank].data_ptr()):
            return _exchange_in_steps(out, pieces, op, group, at_once)
        received = torch.empty_like(send)
        work = dist.all_to_all_single(as_bytes(received), as_bytes(send), group=group, async_op=True)
    return Pending(out, [work], lambda: reduce_rows(received.view(num_ranks, -1).unbind(), op, out))


def _exchange_in_steps(
    out: torch.Tensor, pieces: list[torch.Tensor], op: str, group: dist.ProcessGroup, at_once: bool
) -> Pending:
    """One rank's contribution a step: the first goes to ``out``, the others to memory of their own, or with ``at_once``
    where the piece was that the step before has sent; then only the last step is still running on return."""
    rank, num_ranks = group.rank(), len(pieces)
    rows = list(pieces)
    works: list[dist.Work] = []
    free = [out] if at_once else [out, *out.new_empty(max(0, num_ranks - 2), out.numel())]
    for step in range(1, num_ranks):
        target, source = (rank + step) % num_ranks, (rank - step) % num_ranks
        if not free:
            works.pop().wait()
            free.append(pieces[(target - 1) % num_ranks])
        rows[source] = free.pop(0)
        works.append(_exchange(rows[source], pieces[target], source, target, group))
    return Pending(out, works, lambda: reduce_rows(rows, op, out))


def all_reduce_(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, *, asker: str = "") -> Pending:
    """``tensor``: the elementwise reduction of the ranks' tensors, in place. Moves ``2 (n - 1) / n`` of it."""
    if tensor.numel() == 0:
        return Pending(tensor)
    num_ranks = group.size()
    on_nccl = is_nccl(tensor, group)
    if tensor.dtype not in GLOO_REDUCES and not on_nccl:
        return _reduce_and_gather(tensor, op, group, asker)
    moved = math.ceil(2 * (num_ranks - 1) / num_ranks * tensor.numel() * tensor.element_size())
    divide = op == "avg" and not on_nccl
    with record("all_reduce", num_ranks, moved, asker=asker, group=group):
        work = dist.all_reduce(tensor, op=REDUCE_OPS["sum" if divide else op], group=group, async_op=True)
    return Pending(tensor, [work], (lambda: tensor.div_(num_ranks)) if divide else None)


def _reduce_and_gather(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, asker: str) -> Pending:
    """What gloo does not reduce, or would add up in half precision."""
    num_ranks = group.size()
    size = -(-tensor.numel() // num_ranks)
    padded = tensor if size * num_ranks == tensor.numel() else tensor.new_zeros(size * num_ranks)
    if padded is not tensor:
        padded[: tensor.numel()] = tensor
    piece = reduce_scatter_into(tensor.new_empty(size), padded, op, group, asker=asker).wait()
    gathering = all_gather_into(padded, piece, group, asker=asker)
    if padded is tensor:
        return gathering
    return Pending(tensor, [gathering], lambda: tensor.copy_(padded[: tensor.numel()]))
