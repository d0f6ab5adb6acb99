"""Collectives over equal pieces that write where they are told to: what buffers of whole groups of tensors are moved by.

All tensors are flat and contiguous. Nothing is allocated for a result and, where the backend reduces by itself, nothing
at all. On gloo, whose own versions go through buffers as large as the result,

* an all-gather of two ranks is an exchange, of few a broadcast from each of them, in place (no second buffer, and mostly
  less time);
* a reduce-scatter exchanges the contributions and adds them up on the receiver, in pairs of ranks, and half precision in
  float32 (a third of the time). Two ranks receive in the place of the result. More need memory for the others'
  contributions while it runs, or (``at_once``) exchange rank by rank, each time into what they have sent before; that
  takes no memory, but each step waits for the one before, so that the call returns when all is done.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

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
from vescale.compat import all_gather_single, profiled, reduce_scatter_single

__all__ = ["all_gather_into", "all_reduce_", "reduce_scatter_into"]

_FEW_RANKS = 8
"""Up to here an all-gather is not gloo's own: an exchange takes 0.5 of its CPU time with 2 ranks at 3 MB, broadcasts 0.65
with 4 (exchanges 0.9; in steps of fully_shard on 4 ranks, 0.78 of FSDP2's CPU time against 0.69)."""


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
            by = _all_gather_by_exchange if num_ranks == 2 else _all_gather_by_broadcasts
            return by(out, piece, group)
        return Pending(out, [all_gather_single(as_bytes(out), as_bytes(piece), group=group, async_op=True)])


def _all_gather_by_exchange(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Of two ranks."""
    own, other = out.view(2, -1)[group.rank()], out.view(2, -1)[1 - group.rank()]
    with torch.no_grad(), profiled("gloo:all_gather_by_exchange"):
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        return Pending(out, [_exchange(other, [1 - group.rank()], piece, [1 - group.rank()], group)])


def _all_gather_by_broadcasts(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    slots, own = as_bytes(out).view(group.size(), -1).unbind(), as_bytes(piece)
    with torch.no_grad(), profiled("gloo:all_gather_by_broadcasts"):
        if slots[group.rank()].data_ptr() != own.data_ptr():
            slots[group.rank()].copy_(own)
        return Pending(out, [group.broadcast([slot], _broadcast_from(source)) for source, slot in enumerate(slots)])


@functools.cache
def _broadcast_from(source: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.asyncOp = source, True
    return options


def _exchange(
    out: torch.Tensor, sources: Sequence[int], send: torch.Tensor, targets: Sequence[int], group: dist.ProcessGroup
) -> dist.Work:
    """A piece of ``send`` to each target, and as large a one from each source to ``out``, both in rank order."""
    num_bytes = (out.numel() + send.numel()) * out.element_size() // (len(sources) + len(targets))
    received, sent = ([num_bytes * (rank in some) for rank in range(group.size())] for some in (sources, targets))
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
        if num_ranks == 1 or ((at_once or num_ranks == 2) and out.data_ptr() != pieces[rank].data_ptr()):
            return _exchange_in_steps(out, pieces, op, group)
        return _exchange_with_all(out, send, op, group)


def _exchange_with_all(out: torch.Tensor, send: torch.Tensor, op: str, group: dist.ProcessGroup) -> Pending:
    """Down to the ranks before this one and up to those after it: its own contribution stays where it is, and the others
    get memory while it runs."""
    rank, num_ranks = group.rank(), group.size()
    before, after = range(rank), range(rank + 1, num_ranks)
    received = out.new_empty(num_ranks - 1, out.numel())
    works = [
        _exchange(received[rank:].view(-1), after, send[: rank * out.numel()], before, group),
        _exchange(received[:rank].view(-1), before, send[(rank + 1) * out.numel() :], after, group),
    ]
    rows = [*received[:rank], send.view(num_ranks, -1)[rank], *received[rank:]]
    return Pending(out, works, lambda: reduce_rows(rows, op, out))


def _exchange_in_steps(out: torch.Tensor, pieces: list[torch.Tensor], op: str, group: dist.ProcessGroup) -> Pending:
    """One rank's contribution a step: the first goes to ``out``, the others where the piece was that the step before has
    sent. Only the last step is still running on return."""
    rank, num_ranks = group.rank(), len(pieces)
    rows = list(pieces)
    works: list[dist.Work] = []
    free = out
    for step in range(1, num_ranks):
        target, source = (rank + step) % num_ranks, (rank - step) % num_ranks
        if works:
            works.pop().wait()
            free = pieces[(target - 1) % num_ranks]
        rows[source] = free
        works.append(_exchange(free, [source], pieces[target], [target], group))
    return Pending(out, works, lambda: reduce_rows(rows, op, out))


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    return options


# For calls of the group itself, which cost less than dist.all_reduce's checks: this one runs for every small bucket.
_REDUCE_OPTIONS = {name: _options(op) for name, op in REDUCE_OPS.items()}


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
    options = _REDUCE_OPTIONS["sum" if divide else op]
    with record("all_reduce", num_ranks, moved, asker=asker, group=group):
        if tensor.is_complex():  # not every operation has a meaning
            work = dist.all_reduce(tensor, op=options.reduceOp, group=group, async_op=True)
        else:
            work = group.allreduce([tensor], options)
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
