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
from typing import Any

import torch
import torch.distributed as dist

from vescale.comm._kept_results import keeps_result
from vescale.comm._ledger import record
from vescale.comm._pending import (
    GLOO_REDUCES,
    REDUCE_OPS,
    Messages,
    Pending,
    as_bytes,
    is_gloo,
    is_nccl,
    moves_nothing,
    one_reduction,
    reduce_rows,
)
from vescale.comm._streams import is_beside
from vescale.compat import all_gather_single, is_traced, profiled, reduce_scatter_single, traced_all_to_all

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


# Collectives over equal pieces that write to a given tensor: they move the buffers of groups of tensors. All tensors
# are flat and contiguous. No memory is allocated for a result and, if the backend can reduce, none at all. For other
# backends, an all-gather of the backend, or an all-to-all and a local sum, is used. gloo's own versions use buffers as
# large as the result; on gloo therefore * an all-gather of few ranks is an exchange between every two ranks, in place
# (no second buffer, and less time); * a reduce-scatter sends each contribution to its destination and adds them there,
# in pairs of ranks, half precision in float32 (a third of the time). One contribution is received in place of the
# result; the others need memory while it runs. With ``at_once``, they are received one rank after the other, each in
# the memory of a piece that has been sent. That needs no memory, but each step waits for the one before, and the call
# returns when all steps are done.

_FEW_RANKS = 8
"""Up to here an all-gather is not gloo's own: an exchange takes 0.5 of its CPU time with 2 ranks at 3 MB, messages 0.63 with
4 and 0.69 with 8 at 0.4 MB a piece, and 0.6 of its wall time; broadcasts from each rank take as long as gloo's own. In steps
of fully_shard on 4 ranks messages take 0.77 of FSDP2's wall time, broadcasts 0.83."""


def all_gather_into(
    out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup, *, requester: str = ""
) -> Pending:
    """``out``: the ranks' pieces in rank order. In place when ``piece`` is its own slot of ``out``.

    Receives ``(n - 1) / n`` of ``out``.
    """
    if out.numel() == 0:
        return Pending(out)
    num_ranks = group.size()
    moved = (num_ranks - 1) * piece.numel() * piece.element_size()
    with record("all_gather_v", num_ranks, moved, requester=requester, group=group):
        if num_ranks <= _FEW_RANKS and is_gloo(out, group):
            return _all_gather_by_exchanges(out, piece, group)
        return Pending(out, [all_gather_single(as_bytes(out), as_bytes(piece), group=group, async_op=is_beside(out))])


def _all_gather_by_exchanges(out: torch.Tensor, piece: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    slots = out.view(group.size(), -1).unbind()
    own = slots[group.rank()]
    with torch.no_grad(), profiled("gloo:all_gather_by_exchanges"):
        if own.data_ptr() != piece.data_ptr():
            own.copy_(piece)
        others = _others(group.rank(), group.size())
        return Pending(
            out, [_flat_collectives_exchange(slots[source], source, piece, target, group) for source, target in others]
        )


_TAG = 0x5CA1E
"""Of messages, beside those of a program on the same group."""


def _flat_collectives_exchange(
    out: torch.Tensor, source: int, send: torch.Tensor, target: int, group: dist.ProcessGroup
) -> Any:
    """Send ``send`` to one rank of the group, and receive as much from another in ``out``: on gloo two messages, which
    start on this thread. Between two ranks a collective is used, because large messages in both directions cost more time
    in the kernel."""
    if group.size() > 2 and is_gloo(out, group):
        return Messages(out, [group.recv([out], source, _TAG), group.send([send], target, _TAG)])
    num_bytes, ranks = out.numel() * out.element_size(), range(group.size())
    received, sent = [num_bytes * (r == source) for r in ranks], [num_bytes * (r == target) for r in ranks]
    return dist.all_to_all_single(as_bytes(out), as_bytes(send), received, sent, group=group, async_op=True)


def _others(rank: int, num_ranks: int) -> list[tuple[int, int]]:
    """(source, target) of each step, such that all ranks are busy in every step."""
    return [((rank - step) % num_ranks, (rank + step) % num_ranks) for step in range(1, num_ranks)]


def reduce_scatter_into(
    out: torch.Tensor,
    send: torch.Tensor,
    op: str,
    group: dist.ProcessGroup,
    *,
    requester: str = "",
    at_once: bool = False,
) -> Pending:
    """``out``: this rank's piece of the elementwise reduction of the ranks' ``send``. Sends ``(n - 1) / n`` of it.

    ``op`` is ``sum``, ``avg``, ``max``, ``min`` or ``product``. ``out`` has its own memory or is this rank's piece of
    ``send``, the rest of which is undefined afterwards. ``at_once`` must be the same on all ranks.
    """
    if send.numel() == 0:
        return Pending(out)
    num_ranks = group.size()
    moved = (num_ranks - 1) * out.numel() * out.element_size()
    with record("reduce_scatter_v", num_ranks, moved, requester=requester, group=group):
        if is_nccl(send, group) or moves_nothing(group):
            beside = is_beside(send)
            return Pending(out, [reduce_scatter_single(out, send, op=REDUCE_OPS[op], group=group, async_op=beside)])
        pieces, rank = list(send.view(num_ranks, -1)), group.rank()
        if at_once and out.data_ptr() != pieces[rank].data_ptr():
            return _reduce_scatter_in_steps(out, pieces, op, group)
        if is_gloo(send, group):
            return _reduce_scatter_by_exchanges(out, pieces, op, group)
        received = torch.empty_like(send)
        work = dist.all_to_all_single(as_bytes(received), as_bytes(send), group=group, async_op=is_beside(send))
    return Pending(out, [work], lambda: reduce_rows(received.view(num_ranks, -1).unbind(), op, out))


def _reduce_scatter_by_exchanges(
    out: torch.Tensor, pieces: list[torch.Tensor], op: str, group: dist.ProcessGroup
) -> Pending:
    """All contributions at once: one is received in ``out`` if that has its own memory, the others in memory that is
    allocated for the call; this rank's own is not moved."""
    rank, num_ranks = group.rank(), len(pieces)
    is_apart = num_ranks > 1 and out.data_ptr() != pieces[rank].data_ptr()
    places = [*([out] if is_apart else []), *out.new_empty(num_ranks - 1 - is_apart, out.numel())]
    rows = [*places[:rank], pieces[rank], *places[rank:]]
    others = _others(rank, num_ranks)
    exchanges = [
        _flat_collectives_exchange(rows[source], source, pieces[target], target, group) for source, target in others
    ]
    return Pending(out, exchanges, lambda: reduce_rows(rows, op, out))


def _reduce_scatter_in_steps(
    out: torch.Tensor, pieces: list[torch.Tensor], op: str, group: dist.ProcessGroup
) -> Pending:
    """One contribution a step: the first is received in ``out``, the others in the memory of the piece that the previous
    step has sent. Only the last step is still running on return."""
    rows = list(pieces)
    free, running = out, None
    for source, target in _others(group.rank(), len(pieces)):
        if running is not None:
            running.wait()
            free = pieces[(target - 1) % len(pieces)]
        rows[source] = free
        running = _flat_collectives_exchange(free, source, pieces[target], target, group)
    return Pending(out, [running], lambda: reduce_rows(rows, op, out))


def _options(op: Any, beside: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, beside
    return options


# The group is called directly, without the checks of dist.all_reduce, because this runs for every small bucket.
_REDUCE_OPTIONS = {(name, b): _options(op, b) for name, op in REDUCE_OPS.items() for b in (False, True)}


def all_reduce_(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, *, requester: str = "") -> Pending:
    """``tensor``: the elementwise reduction of the ranks' tensors, in place. Moves ``2 (n - 1) / n`` of it."""
    if tensor.numel() == 0:
        return Pending(tensor)
    num_ranks = group.size()
    on_nccl = is_nccl(tensor, group)
    if tensor.dtype not in GLOO_REDUCES and not on_nccl:
        return _reduce_and_gather(tensor, op, group, requester)
    moved = math.ceil(2 * (num_ranks - 1) / num_ranks * tensor.numel() * tensor.element_size())
    divide = op == "avg" and not on_nccl
    options = _REDUCE_OPTIONS["sum" if divide else op, is_beside(tensor)]
    with record("all_reduce", num_ranks, moved, requester=requester, group=group):
        if tensor.is_complex():  # not every operation has a meaning
            work = dist.all_reduce(tensor, op=options.reduceOp, group=group, async_op=options.asyncOp)
        else:
            work = group.allreduce([tensor], options)
    return Pending(tensor, [work], (lambda: tensor.div_(num_ranks)) if divide else None)


def _reduce_and_gather(tensor: torch.Tensor, op: str, group: dist.ProcessGroup, requester: str) -> Pending:
    """For types that gloo does not reduce, or would add in half precision."""
    num_ranks = group.size()
    size = -(-tensor.numel() // num_ranks)
    padded = tensor if size * num_ranks == tensor.numel() else tensor.new_zeros(size * num_ranks)
    if padded is not tensor:
        padded[: tensor.numel()] = tensor
    piece = reduce_scatter_into(tensor.new_empty(size), padded, op, group, requester=requester).wait()
    gathering = all_gather_into(padded, piece, group, requester=requester)
    if padded is tensor:
        return gathering
    return Pending(tensor, [gathering], lambda: tensor.copy_(padded[: tensor.numel()]))


# ``bytes_text``: numbers of bytes in messages.


def bytes_text(num_bytes: int) -> str:
    """``96 B``, ``1.5 KiB``, ``3.0 GiB``."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
