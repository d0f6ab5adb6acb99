"""``plan_layout``: the smallest communication buffer for a group of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from vescale import csrc
from vescale.buffer._integer_arguments import integers
from vescale.buffer._layout import Layout
from vescale.buffer._plan_buffer import Group, plan_group
from vescale.buffer._split_buffers import BufferPlan, split_group
from vescale.errors import LayoutPlanningError

__all__ = ["Effort", "plan_layout", "table_cap"]

Effort = Literal["fast", "thorough"] | int

# Entries of the largest table that the search may fill: (with the C++ helper, without).
_CAPS = {"fast": (9_000_000, 1_000_000), "thorough": (40_000_000, 4_000_000)}


def table_cap(effort: Effort) -> int:
    """Entries of the largest table that ``effort`` allows on this host.

    Raises:
        ValueError: ``effort`` is neither ``"fast"``, ``"thorough"`` nor a positive integer.
    """
    if isinstance(effort, int) and not isinstance(effort, bool) and effort > 0:
        return effort
    if not isinstance(effort, str) or effort not in _CAPS:
        raise LayoutPlanningError(
            f"effort is {effort!r}; expected 'fast', 'thorough' or a positive number of table entries."
        )
    native, fallback = _CAPS[effort]
    return native if csrc.load("planner") is not None else fallback


@overload
def plan_layout(
    numels: Sequence[int],
    blocks: Sequence[int],
    num_shards: int,
    alignment: int,
    *,
    tensor_alignment: int = 1,
    order: Literal["auto", "default"] = "auto",
    effort: Effort = "fast",
    max_buffers: Literal[1] = 1,
) -> Layout: ...


@overload
def plan_layout(
    numels: Sequence[int],
    blocks: Sequence[int],
    num_shards: int,
    alignment: int,
    *,
    tensor_alignment: int = 1,
    order: Literal["auto", "default"] = "auto",
    effort: Effort = "fast",
    max_buffers: Literal[2, 3, 4],
) -> BufferPlan: ...


@overload
def plan_layout(
    numels: Sequence[int],
    blocks: Sequence[int],
    num_shards: int,
    alignment: int,
    *,
    tensor_alignment: int = 1,
    order: Literal["auto", "default"] = "auto",
    effort: Effort = "fast",
    max_buffers: int,
) -> Layout | BufferPlan: ...


def plan_layout(
    numels: Sequence[int],
    blocks: Sequence[int],
    num_shards: int,
    alignment: int,
    *,
    tensor_alignment: int = 1,
    order: Literal["auto", "default"] = "auto",
    effort: Effort = "fast",
    max_buffers: int = 1,
) -> Layout | BufferPlan:
    """Place tensors in a communication buffer so that no block is cut by a rank boundary, with as little padding as
    possible. A pure function of its arguments (and of whether the C++ helper is there, see ``effort``).

    All sizes are in elements. The problem and the padding figures are those of the veScale-FSDP paper, section 5; the
    paper's Algorithm 1 is ``order="default"``. Causes no communication.

    Args:
        numels: elements of each tensor; 0 is allowed.
        blocks: elements of each tensor's block, counted from the tensor's start, that must stay on one rank; 1 allows
            a cut anywhere, a block of ``numel`` or more keeps the tensor whole. The last block may be short.
        num_shards: ranks that share the buffer.
        alignment: every shard has a multiple of this size (16 bytes of the dtype for NCCL; the least common multiple
            over the dtypes that share a buffer).
        tensor_alignment: every tensor starts at a multiple of this size, in the buffer and therefore in a shard: the
            shard size becomes a multiple of it, too.
        order: ``"auto"`` searches over all orders of the tensors; ``"default"`` keeps the caller's order and runs the
            paper's Algorithm 1, never better than ``"auto"``.
        effort: how large a table the search may fill. It bounds work, never the clock. ``"fast"`` allows 9 million
            entries (of 4 bytes, mostly) and ``"thorough"`` 40 million; without the C++ helper 1 and 4 million. A number
            is taken as it is: pass one where some hosts of a job lack the helper, and all ranks get the same layout.
        max_buffers: above 1, tensors may be split over up to so many buffers, and the result is a :class:`BufferPlan`,
            the tuple ``(layouts, assignment)``, also when one buffer turns out best. The split itself is a heuristic;
            ``optimal`` of each layout speaks of the tensors that it was given.

    Returns:
        A validated :class:`Layout`, or a :class:`BufferPlan` when ``max_buffers > 1``.

    Raises:
        TypeError: a size is not an integer.
        ValueError: a size is out of range, ``numels`` and ``blocks`` differ in length, or an option is unknown.
    """
    numels, blocks = integers("numels", numels), integers("blocks", blocks, at_least=1)
    (num_shards,) = integers("num_shards", [num_shards], at_least=1)
    (alignment,) = integers("alignment", [alignment], at_least=1)
    (tensor_alignment,) = integers("tensor_alignment", [tensor_alignment], at_least=1)
    (max_buffers,) = integers("max_buffers", [max_buffers], at_least=1)
    if len(numels) != len(blocks):
        raise LayoutPlanningError(
            f"plan_layout got {len(numels)} numels and {len(blocks)} blocks; each tensor has one of each. "
            "Pass 1 as the block of a tensor that may be cut anywhere."
        )
    if order not in ("auto", "default"):
        raise LayoutPlanningError(f"order is {order!r}; expected 'auto' or 'default'. 'auto' is never worse.")
    group = Group(numels, blocks, num_shards, alignment, tensor_alignment)
    cap = table_cap(effort)
    if max_buffers == 1:
        return plan_group(group, order, cap)
    return split_group(group, order, cap, max_buffers)
