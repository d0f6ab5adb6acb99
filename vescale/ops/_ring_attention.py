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

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.comm import AxisGroup, Pending, all_to_all_v, keep_tensors, requested_by
from vescale.ops._conversion import differentiable_once

# The schedule of ring attention: which block of keys each rank has at each step, and which queries attend to it. It
# depends on positions alone, and is the same on all ranks; ``explain`` evaluates it, too.

Runs = tuple[tuple[int, int], ...]
"""Intervals [start, stop) of global positions that a rank holds, ascending."""


@dataclass(frozen=True)
class RingSchedule:
    """Blocks of keys and values, one from each rank, are passed round a ring of ranks.

    At step 0 a rank holds its own block, at step ``s`` the one of the rank ``s`` places before it. A block is passed on as
    long as a later rank needs it: contiguous causal shards never pass the end of the sequence.

    Attributes:
        rows: for each rank of the ring the positions of its queries.
        keys: for each rank the positions of its keys.
        is_causal: whether a query attends only to keys up to its own position.
    """

    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    is_causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.keys)

    def length(self, owner: int) -> int:
        """The number of keys in the block of rank ``owner``."""
        return sum(stop - start for start, stop in self.keys[owner])

    def needs(self, rank: int, owner: int) -> bool:
        """Whether a query of ``rank`` attends to a key of ``owner``."""
        rows, keys = self.rows[rank], self.keys[owner]
        if not rows or not keys:
            return False
        return not self.is_causal or rows[-1][1] > keys[0][0]

    @functools.cached_property
    def last_steps(self) -> tuple[int, ...]:
        """For each block the last step at which a rank needs it."""
        num = self.num_ranks
        steps = ([s for s in range(num) if self.needs((owner + s) % num, owner)] for owner in range(num))
        return tuple(max(found, default=0) for found in steps)

    @property
    def num_steps(self) -> int:
        """The number of steps at which some rank attends; blocks move before each but the first."""
        return 1 + max(self.last_steps)

    def held(self, rank: int, step: int) -> int | None:
        """The owner of the block that ``rank`` holds at ``step``; None if it holds none."""
        owner = (rank - step) % self.num_ranks
        return owner if step <= self.last_steps[owner] and self.keys[owner] else None

    def forward_moves(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(source, target, owner) of the blocks that are sent before ``step``."""
        for rank in range(self.num_ranks):
            owner = self.held(rank, step)
            if owner is not None:
                yield (rank - 1) % self.num_ranks, rank, owner

    def gradient_moves(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(source, target, owner) of the gradients of blocks that are sent after ``step``: with the block or, after its last
        step, to its owner."""
        for rank in range(self.num_ranks):
            owner = self.held(rank, step)
            if owner is None:
                continue
            to = (rank + 1) % self.num_ranks if step < self.last_steps[owner] else owner
            if to != rank:
                yield rank, to, owner


@dataclass(frozen=True)
class Meeting:
    """Rows of a rank that attend to keys of a block, as local intervals [start, stop).

    ``is_causal``: there are as many rows as keys, and row i attends to the first i + 1 keys; else each row attends to all.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    is_causal: bool = False


@functools.lru_cache(maxsize=4096)
def meetings(rows: Runs, keys: Runs, is_causal: bool) -> tuple[Meeting, ...]:
    """Which rows of a rank attend to which keys of a block: rectangles, and triangles on the diagonal."""
    num_rows, num_keys = (sum(stop - start for start, stop in runs) for runs in (rows, keys))
    if not num_rows or not num_keys:
        return ()
    if not is_causal:
        return (Meeting((0, num_rows), (0, num_keys)),)
    found: list[Meeting] = []
    row_offset = 0
    for first, end in rows:
        before = sum(min(stop, first) - start for start, stop in keys if start < first)
        own = (row_offset, row_offset + end - first)
        if before:  # the keys before the first row of the run, which are first in the block
            found.append(Meeting(own, (0, before)))
        key_offset = 0
        for start, stop in keys:
            a, b = max(start, first), min(stop, end)
            if a < b:
                local = (key_offset + a - start, key_offset + b - start)
                found.append(Meeting((row_offset + a - first, row_offset + b - first), local, is_causal=True))
                if b < end:
                    found.append(Meeting((row_offset + b - first, own[1]), local))
            key_offset += stop - start
        row_offset += end - first
    return tuple(found)


# Attention of some queries to one block of keys after another: softmax over all blocks without holding them at once.
#
# ============  ==================================  ======================================================================
# tensor        shape                               meaning
# ============  ==================================  ======================================================================
# ``query``     (..., heads, group, rows, size)     ``group`` query heads share a key/value head
# ``key``       (..., heads, keys, size)            of one block
# ``value``     (..., heads, keys, value size)
# ``mask``      broadcasts to (..., heads, group,   bool: keys that a row attends to; else added to scores
#               rows, keys)
# ``kept``      (..., heads, group, rows, keys)     bool: weights that dropout keeps
# ``out``       (..., heads, group, rows,           the result over the blocks so far, in float32 for half precision
#               value size)
# ``log_sum``   (..., heads, group, rows)           log of the sum of exp(score) over keys so far, or -inf
# ============  ==================================  ======================================================================
#
# The result of a block is weighted by ``exp(its log_sum - the new log_sum)``. Rows that attend to no key are zero.
# Scores are computed for a bounded number of rows at a time, forward and backward.
#
# Source: FlashAttention's recomputation, Dao et al., arXiv:2205.14135; merged over ranks: Liu et al., arXiv:2310.01889.

# Number of scores that are held at a time, unless one row has more.
_MAX_SCORES = 1 << 22


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which results and gradients are accumulated."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class _Rows:
    """A piece of a meeting: some of its rows, and its keys."""

    rows: slice
    keys: slice
    first_row: int
    is_causal: bool

    def of(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """The part of a mask for these rows and keys; size 1 stands for all rows, or all keys."""
        if x is None:
            return None
        if x.shape[-2] > 1:
            x = x[..., self.rows, :]
        return x[..., self.keys] if x.shape[-1] > 1 else x


class _Scores:
    """Scores of queries and the keys that they attend to."""

    def __init__(self, query: torch.Tensor, scale: float) -> None:
        self.query, self.scale = query, scale
        self.dtype = accumulation_dtype(query.dtype)

    def pieces(self, meetings: Sequence[Meeting]) -> Iterator[_Rows]:
        for meeting in meetings:
            (first, end), (start, stop) = meeting.rows, meeting.keys
            a_row = math.prod(self.query.shape[:-2]) * (stop - start)
            step = max(1, _MAX_SCORES // max(a_row, 1))
            for row in range(first, end, step):
                yield _Rows(slice(row, min(row + step, end)), slice(start, stop), row - first, meeting.is_causal)

    def of(self, piece: _Rows, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(..., heads, group, rows, keys); -inf where a row does not attend to a key."""
        scores = grouped_product(self.query_of(piece), key.transpose(-1, -2)).mul_(self.scale)
        mask = piece.of(mask)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        if piece.is_causal:
            num_rows, num_keys = scores.shape[-2:]
            rows = torch.arange(piece.first_row, piece.first_row + num_rows, device=scores.device)
            scores.masked_fill_(torch.arange(num_keys, device=scores.device) > rows.unsqueeze(1), -math.inf)
        return scores

    def query_of(self, piece: _Rows) -> torch.Tensor:
        return self.query[..., piece.rows, :].to(self.dtype)


def grouped_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """(..., heads, group, n, m) @ (..., heads, m, k), without copies of ``y`` for the heads of a group."""
    return (x.flatten(-3, -2) @ y).unflatten(-2, x.shape[-3:-1])


class Attended:
    """The result of attention to the blocks so far."""

    def __init__(self, query: torch.Tensor, shape: Sequence[int], scale: float) -> None:
        """``shape`` of the result, broadcast over query, key and value."""
        self._scores = _Scores(query, scale)
        self.out = query.new_zeros(tuple(shape), dtype=self._scores.dtype)
        self.log_sum = self.out.new_full(tuple(shape[:-1]), -math.inf)

    def attend(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
    ) -> None:
        """Attend to another block. ``mask`` and ``kept`` have the columns of the block."""
        for piece in self._scores.pieces(meetings):
            keys, values = (x[..., piece.keys, :].to(self._scores.dtype) for x in (key, value))
            scores = self._scores.of(piece, keys, mask)
            log_sum = scores.logsumexp(-1)
            weights = (scores - _finite(log_sum).unsqueeze(-1)).exp_()
            weights = _dropped(weights, piece.of(kept), dropout)
            self._merge(piece.rows, grouped_product(weights, values), log_sum)

    def _merge(self, rows: slice, out: torch.Tensor, log_sum: torch.Tensor) -> None:
        before = self.log_sum[..., rows]
        after = torch.logaddexp(before, log_sum)
        known = _finite(after)
        own, other = ((x - known).exp_().unsqueeze(-1) for x in (before, log_sum))
        self.out[..., rows, :] = self.out[..., rows, :] * own + out * other
        self.log_sum[..., rows] = after


class BlockGradients:
    """Gradients, block by block, from a finished result; ``query`` accumulates the gradient of the queries."""

    def __init__(
        self, query: torch.Tensor, out: torch.Tensor, log_sum: torch.Tensor, grad: torch.Tensor, scale: float
    ) -> None:
        self._scores = _Scores(query, scale)
        self._grad, self._log_sum = grad, log_sum
        self._inner = (grad.to(out.dtype) * out).sum(-1)  # for each row the mean of the gradients of its weights
        self.query = torch.zeros_like(query, dtype=self._scores.dtype)

    def add(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        meetings: Sequence[Meeting],
        mask: torch.Tensor | None,
        kept: torch.Tensor | None,
        dropout: float,
        gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ) -> None:
        """Add to ``gradients``: of the keys, values and mask columns of a block, in the accumulation dtype."""
        grad_key, grad_value, grad_mask = gradients
        for piece in self._scores.pieces(meetings):
            keys, values = (x[..., piece.keys, :].to(self._scores.dtype) for x in (key, value))
            log_sum = _finite(self._log_sum[..., piece.rows]).unsqueeze(-1)
            weights = (self._scores.of(piece, keys, mask) - log_sum).exp_()
            grad = self._grad[..., piece.rows, :].to(self._scores.dtype)
            used = piece.of(kept)
            _add(grad_value, piece.keys, _over_group(_dropped(weights, used, dropout), grad))
            slope = _dropped(grouped_product(grad, values.transpose(-1, -2)), used, dropout)
            slope = (slope - self._inner[..., piece.rows].unsqueeze(-1)) * weights
            if grad_mask is not None:
                target = piece.of(grad_mask)
                assert target is not None
                target += slope.sum_to_size(target.shape)
            slope.mul_(self._scores.scale)
            _add(self.query, piece.rows, grouped_product(slope, keys))
            _add(grad_key, piece.keys, _over_group(slope, self._scores.query_of(piece)))


def _over_group(weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """(..., heads, keys, size) of weights (..., heads, group, rows, keys) and x (..., heads, group, rows, size)."""
    return weights.flatten(-3, -2).transpose(-1, -2) @ x.flatten(-3, -2)


def _add(total: torch.Tensor, positions: slice, part: torch.Tensor) -> None:
    """Add to positions of the dim before the last, summed over dims that are broadcast."""
    target = total[..., positions, :]
    target += part.sum_to_size(target.shape)


def _finite(log_sum: torch.Tensor) -> torch.Tensor:
    """``log_sum`` with 0 for -inf, so that -inf minus it is -inf for rows that attend to no key."""
    return log_sum.masked_fill(log_sum == -math.inf, 0.0)


def _dropped(weights: torch.Tensor, kept: torch.Tensor | None, dropout: float) -> torch.Tensor:
    if kept is None:
        return weights
    return (weights * kept).mul_(1 / (1 - dropout) if dropout < 1 else 0.0)


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
            f"{ctx.call.ring.requester}: ring attention has no second derivatives, which create_graph=True requests; "
            "write all_gather or ulysses for this axis in the plan's attention section"
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
