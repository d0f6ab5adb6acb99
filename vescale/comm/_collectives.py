"""Collectives over pieces of different sizes, portable to gloo.

All tensors are flat; sizes are in elements, one for each group rank, the same list on every rank.

===================  ==========================================================================================
``all_to_all_v``     one uneven ``all_to_all_single`` (NCCL groups the sends and receives)
``all_gather_v``     equal pieces: ``all_gather_single``; nearly equal: the same, padded (at most ``MAX_PADDING`` of
                     the payload). Skewed pieces: NCCL: the list form, one group of broadcasts; gloo: a broadcast each
                     from one or two owners, else ``all_to_all_v``
``reduce_scatter_v`` NCCL: ``reduce_scatter_single`` for equal pieces, else the list form, one group of reductions;
                     gloo: ``all_to_all_v`` and a local reduction
``all_reduce``       the backend's; on gloo ``reduce_scatter_v`` and ``all_gather_v`` for half precision and the
                     integers that gloo does not reduce
===================  ==========================================================================================

Under ``torch.compile`` all of them are one uneven ``all_to_all_single`` that the graph contains and waits for, and local
steps; the ledger has them once, when they are traced.

Nothing is communicated when all sizes are zero. Data that is only moved is moved as bytes, so every dtype works on every
backend. Local reductions add in rank order, half precision in float32, so that the result does not depend on timing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale.comm._kept_results import keeps_result
from vescale.comm._ledger import record
from vescale.comm._pending import REDUCE_OPS, Pending, as_bytes, is_nccl, one_reduction, reduce_rows
from vescale.compat import all_gather_single, is_traced, reduce_scatter_single, traced_all_to_all

__all__ = ["MAX_PADDING", "all_gather_v", "all_reduce", "all_to_all_v", "gathered_size", "reduce_scatter_v"]

# A padded all-gather may move at most this share of its payload as padding.
MAX_PADDING = 0.25


@keeps_result
def all_to_all_v(
    send: torch.Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    out: torch.Tensor | None = None,
    requester: str = "",
) -> Pending:
    """Send consecutive pieces of ``send`` to the group's ranks; ``out`` holds the received pieces in rank order.

    Receives the off-diagonal sizes. Every rank of the group must call it, also with all sizes zero.
    """
    rank, send = dist.get_rank(group), send.contiguous()
    out = send.new_empty(sum(receive_sizes)) if out is None else out
    size = send.element_size()  # no early return here: each rank sees its own sizes only, so all must take part
    moved = (sum(receive_sizes) - receive_sizes[rank]) * size
    with record("all_to_all_v", len(send_sizes), moved, requester=requester, group=group):
        return _exchange(send, send_sizes, receive_sizes, group, out)


def _exchange(
    send: torch.Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    group: dist.ProcessGroup,
    out: torch.Tensor,
) -> Pending:
    """The all-to-all itself, as bytes; not in the ledger."""
    size = send.element_size()
    if is_traced(send):
        sent = [n * size for n in send_sizes]
        received = traced_all_to_all(send.view(torch.uint8), sent, [n * size for n in receive_sizes], group)
        return Pending(out.copy_(received.view(send.dtype)))
    work = dist.all_to_all_single(
        as_bytes(out),
        as_bytes(send),
        [n * size for n in receive_sizes],
        [n * size for n in send_sizes],
        group=group,
        async_op=True,
    )
    return Pending(out, [work])


@keeps_result
def all_gather_v(
    local: torch.Tensor,
    sizes: Sequence[int],
    group: dist.ProcessGroup,
    *,
    out: torch.Tensor | None = None,
    requester: str = "",
) -> Pending:
    """Concatenate the ranks' ``local`` pieces, ``sizes[i]`` elements from rank ``i``, in ``out`` on every rank.

    Receives ``sum(sizes) - sizes[rank]`` elements, plus padding as the module's table says.
    """
    rank, num_ranks, total, local = dist.get_rank(group), len(sizes), sum(sizes), local.contiguous()
    size, largest = local.element_size(), gathered_size(sizes)
    payload = (total - sizes[rank]) * size
    out = local.new_empty(total) if out is None else out
    if total == 0:
        return Pending(out)
    if is_traced(local):
        with record("all_gather_v", num_ranks, payload, requester=requester, group=group):
            return _exchange(local.repeat(num_ranks), [local.numel()] * num_ranks, sizes, group, out)
    if largest is not None and num_ranks * largest == total:
        with record("all_gather_v", num_ranks, payload, requester=requester, group=group):
            return Pending(out, [all_gather_single(as_bytes(out), as_bytes(local), group=group, async_op=True)])
    if largest is not None:
        padding = (num_ranks * largest - total - (largest - sizes[rank])) * size
        padded = local.new_zeros(largest)
        padded[: local.numel()] = local
        wide = local.new_empty(num_ranks * largest)
        moved = payload + padding
        with record("all_gather_v", num_ranks, moved, padding_bytes=padding, requester=requester, group=group):
            work = all_gather_single(as_bytes(wide), as_bytes(padded), group=group, async_op=True)
        pieces = [wide[i * largest : i * largest + n] for i, n in enumerate(sizes)]
        return Pending(out, [work], lambda: torch.cat(pieces, out=out))
    with record("all_gather_v", num_ranks, payload, requester=requester, group=group):
        return _gather_skewed(local, sizes, group, out)


def gathered_size(sizes: Sequence[int]) -> int | None:
    """How many elements each rank sends if one all-gather of equal pieces, padded where needed, moves them; else None."""
    largest = max(sizes)
    return largest if len(sizes) * largest <= (1 + MAX_PADDING) * sum(sizes) else None


def _gather_skewed(local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup, out: torch.Tensor) -> Pending:
    rank, num_ranks = dist.get_rank(group), len(sizes)
    slots = list(out.split(list(sizes)))
    if is_nccl(local, group):
        work = dist.all_gather([as_bytes(slot) for slot in slots], as_bytes(local), group=group, async_op=True)
        return Pending(out, [work])
    slots[rank].copy_(local)
    owners = [i for i, n in enumerate(sizes) if n]
    if len(owners) <= 2:
        works = [dist.broadcast(as_bytes(slots[i]), group=group, group_src=i, async_op=True) for i in owners]
        return Pending(out, works)
    return _exchange(local.repeat(num_ranks), [local.numel()] * num_ranks, sizes, group, out)


@keeps_result
def reduce_scatter_v(
    send: torch.Tensor,
    sizes: Sequence[int],
    op: str,
    group: dist.ProcessGroup,
    *,
    out: torch.Tensor | None = None,
    requester: str = "",
) -> Pending:
    """Reduce the ranks' ``send`` tensors elementwise; rank ``i`` gets the i-th piece, of ``sizes[i]`` elements.

    ``op`` is ``sum``, ``avg``, ``max``, ``min`` or ``product``. Sends ``sum(sizes) - sizes[rank]`` elements.
    """
    rank, num_ranks, send = dist.get_rank(group), len(sizes), send.contiguous()
    out = send.new_empty(sizes[rank]) if out is None else out
    if sum(sizes) == 0:
        return Pending(out)
    moved = (sum(sizes) - sizes[rank]) * send.element_size()
    with record("reduce_scatter_v", num_ranks, moved, requester=requester, group=group):
        if is_nccl(send, group) and not is_traced(send):
            if len(set(sizes)) == 1:
                work = reduce_scatter_single(out, send, op=REDUCE_OPS[op], group=group, async_op=True)
            else:
                pieces = list(send.split(list(sizes)))
                work = dist.reduce_scatter(out, pieces, op=REDUCE_OPS[op], group=group, async_op=True)
            return Pending(out, [work])
        own = sizes[rank]
        pending = _exchange(send, sizes, [own] * num_ranks, group, send.new_empty(num_ranks * own))
    return Pending(out, [pending], lambda: reduce_rows(pending.out.view(num_ranks, own).unbind(), op, out))


@keeps_result
def all_reduce(local: torch.Tensor, op: str, group: dist.ProcessGroup, *, requester: str = "") -> Pending:
    """The reduction of the ranks' tensors (any shape) on every rank; ``local`` is not changed."""
    num_ranks = dist.get_world_size(group)
    if local.numel() == 0:
        return Pending(torch.empty_like(local, memory_format=torch.contiguous_format))
    reduction = None if is_traced(local) else one_reduction(op, local.dtype, local.device.type, group)
    if reduction is None:
        base, extra = divmod(local.numel(), num_ranks)
        sizes = [base + (rank < extra) for rank in range(num_ranks)]
        piece = reduce_scatter_v(local.reshape(-1), sizes, op, group, requester=requester).wait()
        gathered = all_gather_v(piece, sizes, group, requester=requester)
        return gathered.reshaped(gathered.out.view(local.shape))
    moved = math.ceil(2 * (num_ranks - 1) / num_ranks * local.numel() * local.element_size())
    out = local.clone(memory_format=torch.contiguous_format)
    reduce_op, divisor = reduction
    with record("all_reduce", num_ranks, moved, requester=requester, group=group):
        work = dist.all_reduce(out, op=reduce_op, group=group, async_op=True)
    return Pending(out, [work], (lambda: out.div_(divisor)) if divisor > 1 else None)
