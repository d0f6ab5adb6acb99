"""Ring attention: blocks of keys and values are passed round the ranks that shard the sequence; each attends to every block.

===========  ========================================================  ===============================================
phase        sent in a step                                            memory of a rank
===========  ========================================================  ===============================================
forward      the current block to the next rank, during attention to   its own keys and values, the current block and
             it                                                        the next one
backward     the same; then the partial gradients of the block, and    the same, and as much again for gradients
             from the last rank that adds to them the gradients to
             the owner of the block
===========  ========================================================  ===============================================

Each step is one uneven all-to-all with one or two peers, so that no order of sends and receives can deadlock. The schedule
(:class:`vescale.ops.RingSchedule`) depends on positions alone, so that all ranks agree on it without communication. A block
is not sent to ranks that do not need it. Backward recomputes the scores of each block, and nothing else.

Source: Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.comm import AxisGroup, Pending, all_to_all_v, keep_tensors, requested_by
from vescale.ops._block_attention import Attended, BlockGradients, accumulation_dtype
from vescale.ops._ring_schedule import RingSchedule, meetings
from vescale.ops._second_derivatives import differentiable_once

__all__ = ["Ring", "ring_attention"]

# (source, target, owner) of the blocks that are sent in one step.
_Moves = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, by their index in ``group``.

    Attributes:
        schedule: of the ring's ranks, in the group's order.
        requester: of the communication, in the ledger.
    """

    group: AxisGroup
    schedule: RingSchedule
    requester: str

    def move(self, block: torch.Tensor | None, moves: _Moves, key_size: int, requester: str) -> _Receiving | None:
        """Start to send ``block``, flat, of ``key_size`` elements a key, as ``moves`` say; None if nothing is sent."""
        if not moves:
            return None
        own = self.group.index
        send, receive = [0] * self.group.size, [0] * self.group.size
        for source, target, owner in moves:
            if source == own:
                send[target] = self.schedule.length(owner) * key_size
            if target == own:
                receive[source] = self.schedule.length(owner) * key_size
        assert block is not None
        with requested_by(requester):
            pending = all_to_all_v(block if sum(send) else block[:0], send, receive, self.group.group)
        return _Receiving(pending, {owner: source for source, target, owner in moves if target == own}, receive)


@dataclass(frozen=True)
class _Receiving:
    """The blocks that this rank receives in one step, by their owner."""

    pending: Pending
    sources: dict[int, int]
    sizes: Sequence[int]

    def wait(self) -> dict[int, torch.Tensor]:
        pieces = self.pending.wait().split(list(self.sizes))
        return {owner: pieces[source] for owner, source in self.sources.items()}


@dataclass(frozen=True)
class _Blocks:
    """Keys and values side by side, one flat tensor a block.

    Attributes:
        key, value: shapes of this rank's own, (..., heads, keys, size).
    """

    key: tuple[int, ...]
    value: tuple[int, ...]

    @property
    def key_size(self) -> int:
        """Elements of a block for each key."""
        return sum(math.prod(shape[:-2]) * shape[-1] for shape in (self.key, self.value))

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, block: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [(*shape[:-2], num_keys, shape[-1]) for shape in (self.key, self.value)]
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that are not tensors."""

    ring: Ring
    blocks: _Blocks
    scale: float
    dropout: float

    def columns(self, owner: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """The columns of a block, of a mask over all keys."""
        if x is None or x.shape[-1] == 1:
            return x
        runs = self.ring.schedule.keys[owner]
        return x[..., runs[0][0] : runs[0][1]] if len(runs) == 1 else torch.cat([x[..., a:b] for a, b in runs], -1)

    def pass_round(
        self, block: torch.Tensor, requester: str, visit: Callable[[int, int | None, torch.Tensor | None], None]
    ) -> None:
        """Call ``visit(step, owner, block)`` for the block of each step, while the next one is received."""
        ring, schedule, held = self.ring, self.ring.schedule, block
        for step in range(schedule.num_steps):
            moves = list(schedule.forward_moves(step + 1)) if step + 1 < schedule.num_steps else []
            receiving = ring.move(held, moves, self.blocks.key_size, f"{ring.requester}: {requester}")
            owner = schedule.held(ring.group.index, step)
            visit(step, owner, None if owner is None else held)
            if receiving is not None:
                held = next(iter(receiving.wait().values()), held[:0])


class _RingAttention(torch.autograd.Function):
    """``own_block``: this rank's keys and values, packed by :class:`_Blocks`."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        query: torch.Tensor,
        own_block: torch.Tensor,
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        out, log_sum = keep_tensors(lambda: _attended(call, query, own_block, mask, kept))
        ctx.call = call
        ctx.save_for_backward(query, own_block, mask, kept, out, log_sum)
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint hands each of them out a single time
        query, own_block, mask, *_ = saved
        with torch.no_grad():
            found = _RingAttention._gradients(ctx, grad, saved)
        once = (
            f"{ctx.call.ring.requester}: blocks that go round have no derivatives of their gradients, and these are "
            "asked for (create_graph=True); write all_gather or ulysses for this axis in the plan's attention section"
        )
        return None, *differentiable_once(found, (grad, query, own_block, mask), once), None

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the query, the block and the mask."""
        call: _Call = ctx.call
        query, own_block, mask, kept, out, log_sum = saved
        ring, schedule, own = call.ring, call.ring.schedule, call.ring.group.index
        gradients = BlockGradients(query, out, log_sum, grad, call.scale)
        mask_gradient = torch.zeros_like(mask, dtype=out.dtype) if ctx.needs_input_grad[3] else None
        receiving: _Receiving | None = None
        own_gradient: torch.Tensor | None = None

        def visit(step: int, owner: int | None, block: torch.Tensor | None) -> None:
            nonlocal receiving, own_gradient
            found: torch.Tensor | None = None
            if owner is not None and block is not None:
                found = _of_block(call, gradients, owner, block, mask, kept, mask_gradient)
            for received_owner, part in (receiving.wait() if receiving is not None else {}).items():
                if received_owner == own:
                    own_gradient = part
                else:
                    assert found is not None and received_owner == owner
                    found += part
            if owner == own and schedule.last_steps[own] == 0:
                own_gradient = found
            moves = list(schedule.gradient_moves(step))
            receiving = ring.move(
                query.new_empty(0, dtype=out.dtype) if found is None else found,
                moves,
                call.blocks.key_size,
                f"{ring.requester}: gradient",
            )

        call.pass_round(own_block, "keys and values again", visit)
        if receiving is not None:
            own_gradient = receiving.wait().get(own, own_gradient)
        if own_gradient is None:  # no keys here
            own_gradient = torch.zeros_like(own_block)
        grad_mask = mask_gradient.to(mask.dtype) if mask_gradient is not None else None
        return gradients.query.to(query.dtype), own_gradient.to(own_block.dtype), grad_mask


def _attended(
    call: _Call,
    query: torch.Tensor,
    own_block: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and the logarithms of the sums of weights."""
    schedule, own = call.ring.schedule, call.ring.group.index
    key, value = call.blocks.key, call.blocks.value
    leading = torch.broadcast_shapes(query.shape[:-3], key[:-2], value[:-2])
    attended = Attended(query, (*leading, *query.shape[-3:-1], value[-1]), call.scale)

    def visit(step: int, owner: int | None, block: torch.Tensor | None) -> None:
        if owner is None or block is None:
            return
        met = meetings(schedule.rows[own], schedule.keys[owner], schedule.is_causal)
        if met:
            k, v = call.blocks.unpack(block, schedule.length(owner))
            attended.attend(k, v, met, call.columns(owner, mask), call.columns(owner, kept), call.dropout)

    call.pass_round(own_block, "keys and values", visit)
    return attended.out, attended.log_sum


def _of_block(
    call: _Call,
    gradients: BlockGradients,
    owner: int,
    block: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    mask_gradient: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of a block from this rank's queries, flat; adds to the gradient of its columns of the mask."""
    schedule, own = call.ring.schedule, call.ring.group.index
    found = block.new_zeros(block.shape, dtype=accumulation_dtype(block.dtype))
    met = meetings(schedule.rows[own], schedule.keys[owner], schedule.is_causal)
    if not met:
        return found
    k, v = call.blocks.unpack(block, schedule.length(owner))
    columns = call.columns(owner, mask_gradient)  # a copy where the block's keys are several runs
    grads = (*call.blocks.unpack(found, schedule.length(owner)), columns)
    gradients.add(k, v, met, call.columns(owner, mask), call.columns(owner, kept), call.dropout, grads)
    runs = schedule.keys[owner]
    if mask_gradient is not None and columns is not None and columns.shape[-1] > 1 and len(runs) > 1:
        offset = 0
        for start, stop in runs:
            mask_gradient[..., start:stop] = columns[..., offset : offset + stop - start]
            offset += stop - start
    return found


def ring_attention(
    ring: Ring,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    *,
    scale: float | None,
    dropout: float,
    grouped: bool,
) -> torch.Tensor:
    """Attention of this rank's query to the keys and values of all ranks of the ring, of which it has a part.

    Shapes are those of ``F.scaled_dot_product_attention``; ``mask`` and ``kept`` (the weights that dropout keeps) have this
    rank's rows and all keys. ``grouped``: there are fewer key/value heads than query heads.

    Communication: see the module's table. Raises RuntimeError where the gradients are differentiated.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):  # as it does with F.scaled_dot_product_attention
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    if query.ndim == 2:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        found = ring_attention(ring, query, key, value, mask, kept, scale=scale, dropout=dropout, grouped=False)
        return found.squeeze(0)
    heads = key.shape[-3] if grouped else query.shape[-3]
    group = query.shape[-3] // heads

    def in_groups(x: torch.Tensor | None) -> torch.Tensor | None:
        """(..., query heads, n, m) with the heads in groups; unchanged if there is one for all heads, or no dim of heads."""
        if x is None or x.ndim < 3:
            return x
        return x.unflatten(-3, (heads, group)) if x.shape[-3] == heads * group else x.unsqueeze(-3)

    call = _Call(
        ring,
        _Blocks(tuple(key.shape), tuple(value.shape)),
        1 / math.sqrt(query.shape[-1]) if scale is None else scale,
        dropout,
    )
    with torch.autocast(device, enabled=False):
        own_block = call.blocks.pack(key, value)
        found = _RingAttention.apply(call, in_groups(query), own_block, in_groups(mask), in_groups(kept))
    return found.flatten(-4, -3)
