"""Ring attention: blocks of keys and values travel round the ranks that cut the sequence, and each rank attends to one after
the other.

===========  ========================================================  ===============================================
phase        a step moves                                              a rank has at a time
===========  ========================================================  ===============================================
forward      the block at hand to the next rank, while it is attended  its own keys and values, the block at hand and
             to                                                        the one that comes
backward     the same; and the block's gradients, as far as they are   the same, and as much again for gradients
             known, after it; from the last rank that has something
             to add they go home
===========  ========================================================  ===============================================

Each move is one uneven all-to-all in which a rank has one peer, or two: no rank waits for another to have received. What
travels where follows from positions alone (:class:`vescale.ir.RingSchedule`), so all ranks agree without asking. Blocks that
nobody further on needs stay; nothing is recomputed but the scores of a block, in backward.

Source: Liu et al., arXiv:2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.comm import AxisGroup, Pending, all_to_all_v, asking
from vescale.ir import RingSchedule, meetings
from vescale.runtime._block_attention import Attended, BlockGradients, accumulation_dtype
from vescale.runtime._once import differentiable_once

__all__ = ["Ring", "ring_attention"]

# (from, to, whose) of what moves in one step.
_Moves = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, by their index in ``group``.

    Attributes:
        schedule: of the ring's ranks, in the group's order.
        requester: for the ledger.
    """

    group: AxisGroup
    schedule: RingSchedule
    requester: str

    def move(self, block: torch.Tensor | None, moves: _Moves, a_key: int, requester: str) -> _Coming | None:
        """Starts a step: ``block``, flat, of ``a_key`` elements a key, goes where ``moves`` say; None: nothing moves."""
        if not moves:
            return None
        own = self.group.index
        send, receive = [0] * self.group.size, [0] * self.group.size
        for source, target, owner in moves:
            if source == own:
                send[target] = self.schedule.length(owner) * a_key
            if target == own:
                receive[source] = self.schedule.length(owner) * a_key
        assert block is not None
        with asking(requester):
            pending = all_to_all_v(block if sum(send) else block[:0], send, receive, self.group.group)
        return _Coming(pending, {owner: source for source, target, owner in moves if target == own}, receive)


@dataclass(frozen=True)
class _Coming:
    """What one step brings: blocks by their owner."""

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
    def a_key(self) -> int:
        """Elements for each key."""
        return sum(math.prod(shape[:-2]) * shape[-1] for shape in (self.key, self.value))

    def pack(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.cat([key.reshape(-1), value.reshape(-1)])

    def unpack(self, block: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [(*shape[:-2], num_keys, shape[-1]) for shape in (self.key, self.value)]
        key, value = block.split([math.prod(shape) for shape in shapes])
        return key.view(shapes[0]), value.view(shapes[1])


@dataclass(frozen=True)
class _Call:
    """What of a call is no tensor."""

    ring: Ring
    blocks: _Blocks
    scale: float
    dropout: float

    def columns(self, owner: int, x: torch.Tensor | None) -> torch.Tensor | None:
        """A block's columns of a mask over all keys."""
        if x is None or x.shape[-1] == 1:
            return x
        runs = self.ring.schedule.keys[owner]
        return x[..., runs[0][0] : runs[0][1]] if len(runs) == 1 else torch.cat([x[..., a:b] for a, b in runs], -1)

    def travel(
        self, block: torch.Tensor, requester: str, visit: Callable[[int, int | None, torch.Tensor | None], None]
    ) -> None:
        """``visit(step, owner, block)`` of each step's block, while the next one comes."""
        ring, schedule, held = self.ring, self.ring.schedule, block
        for step in range(schedule.num_steps):
            moves = list(schedule.forward_moves(step + 1)) if step + 1 < schedule.num_steps else []
            coming = ring.move(held, moves, self.blocks.a_key, f"{ring.requester}: {requester}")
            owner = schedule.held(ring.group.index, step)
            visit(step, owner, None if owner is None else held)
            if coming is not None:
                held = next(iter(coming.wait().values()), held[:0])


class _RingAttention(torch.autograd.Function):
    """``own_block``: this rank's keys and values, packed."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        query: torch.Tensor,
        own_block: torch.Tensor,
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
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
                attended.meet(k, v, met, call.columns(owner, mask), call.columns(owner, kept), call.dropout)

        call.travel(own_block, "keys and values", visit)
        ctx.call = call
        ctx.save_for_backward(query, own_block, mask, kept, attended.out, attended.log_sum)
        return attended.out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, own_block, mask, *_ = ctx.saved_tensors
        with torch.no_grad():
            found = _RingAttention._gradients(ctx, grad)
        once = (
            f"{ctx.call.ring.requester}: blocks that go round have no derivatives of their gradients, and these are "
            "asked for (create_graph=True); write all_gather or ulysses for this axis in the plan's attention section"
        )
        return None, *differentiable_once(found, (grad, query, own_block, mask), once), None

    @staticmethod
    def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Of the query, the block and the mask."""
        call: _Call = ctx.call
        query, own_block, mask, kept, out, log_sum = ctx.saved_tensors
        ring, schedule, own = call.ring, call.ring.schedule, call.ring.group.index
        gradients = BlockGradients(query, out, log_sum, grad, call.scale)
        mask_gradient = torch.zeros_like(mask, dtype=out.dtype) if ctx.needs_input_grad[3] else None
        coming: _Coming | None = None
        home: torch.Tensor | None = None

        def visit(step: int, owner: int | None, block: torch.Tensor | None) -> None:
            nonlocal coming, home
            found: torch.Tensor | None = None
            if owner is not None and block is not None:
                found = _of_block(call, gradients, owner, block, mask, kept, mask_gradient)
            for whose, part in (coming.wait() if coming is not None else {}).items():
                if whose == own:
                    home = part
                else:
                    assert found is not None and whose == owner
                    found += part
            if owner == own and schedule.last_steps[own] == 0:
                home = found
            moves = list(schedule.gradient_moves(step))
            coming = ring.move(
                query.new_empty(0, dtype=out.dtype) if found is None else found,
                moves,
                call.blocks.a_key,
                f"{ring.requester}: gradient",
            )

        call.travel(own_block, "keys and values again", visit)
        if coming is not None:
            home = coming.wait().get(own, home)
        if home is None:  # no keys here
            home = torch.zeros_like(own_block)
        grad_mask = mask_gradient.to(mask.dtype) if mask_gradient is not None else None
        return gradients.query.to(query.dtype), home.to(own_block.dtype), grad_mask


def _of_block(
    call: _Call,
    gradients: BlockGradients,
    owner: int,
    block: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    mask_gradient: torch.Tensor | None,
) -> torch.Tensor:
    """What this rank's queries add to the gradients of a block, flat; and to those of its columns of the mask."""
    schedule, own = call.ring.schedule, call.ring.group.index
    found = block.new_zeros(block.shape, dtype=accumulation_dtype(block.dtype))
    met = meetings(schedule.rows[own], schedule.keys[owner], schedule.is_causal)
    if not met:
        return found
    k, v = call.blocks.unpack(block, schedule.length(owner))
    columns = call.columns(owner, mask_gradient)  # a copy where the block's keys are several runs
    grads = (*call.blocks.unpack(found, schedule.length(owner)), columns)
    gradients.meet(k, v, met, call.columns(owner, mask), call.columns(owner, kept), call.dropout, grads)
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

    Shapes as for ``F.scaled_dot_product_attention``; ``mask`` and ``kept`` (what dropout keeps) have the rows that are here,
    and all keys. ``grouped``: fewer key/value heads than query heads, each for as many neighbours.

    Communication: by the module's table. Gradients have no gradients of their own: RuntimeError where these are asked for.
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

    def opened(x: torch.Tensor | None) -> torch.Tensor | None:
        """(..., query heads, n, m) with the heads in groups; one for all heads, or none, stays so."""
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
        found = _RingAttention.apply(call, opened(query), own_block, opened(mask), opened(kept))
    return found.flatten(-4, -3)
