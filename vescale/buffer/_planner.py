"""``plan_layout``: the smallest communication buffer for a group of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple, overload

from vescale import csrc
from vescale.buffer._layout import Layout, integers, offsets_in_order
from vescale.buffer._shard_size_search import FREE_STATES, Bounds, Problem, search
from vescale.errors import DBufferError

# Plans one buffer: from checked arguments to a ``Layout``, once for all groups with the same arguments.


@dataclass(frozen=True)
class Group:
    """The tensors that share buffers, in elements."""

    numels: tuple[int, ...]
    blocks: tuple[int, ...]
    num_shards: int
    alignment: int
    tensor_alignment: int

    @property
    def problem(self) -> Problem:
        return Problem.normal(self.numels, self.blocks, self.num_shards, self.alignment, self.tensor_alignment)

    def subset(self, tensors: Sequence[int]) -> Group:
        return replace(
            self, numels=tuple(self.numels[i] for i in tensors), blocks=tuple(self.blocks[i] for i in tensors)
        )


@lru_cache(maxsize=512)  # the 61 layers of a model are two or three different groups
def plan_group(group: Group, order: str, cap: int) -> Layout:
    """The smallest layout that the search finds with tables of at most ``cap`` entries."""
    problem = group.problem
    offsets = [0] * len(group.numels)  # also those of empty tensors
    shard = lower_bound = 0
    strategy = "empty"
    if problem.numels:
        found = search(problem, order, cap)
        starts = offsets_in_order(problem.numels, problem.blocks, found.order, found.shard)
        for i, start in zip(problem.source, starts, strict=True):
            offsets[i] = start * problem.unit
        shard, lower_bound, strategy = found.shard * problem.unit, found.lower_bound * problem.unit, found.strategy
    return Layout(
        numels=group.numels,
        blocks=group.blocks,
        num_shards=group.num_shards,
        alignment=group.alignment,
        tensor_alignment=group.tensor_alignment,
        shard_size=shard,
        offsets=tuple(offsets),
        lower_bound=lower_bound,
        strategy=strategy,
    )


# Several buffers for one group: tensors whose blocks do not go together stop paying for each other. One buffer's shard
# size must suit every tensor that contains a whole shard, often the least common multiple of unlike row sizes. Two
# buffers, each still contiguous and sent without copies, need not agree.

MIN_SAVING = 0.001  # of the tensors' size: what one more buffer, one more collective, must save
_MAX_ATOMS = 8  # sets of tensors that are kept together; 2 ** (atoms - 1) splits are compared


class BufferPlan(NamedTuple):
    """Several buffers: tensor i is in ``layouts[assignment[i]]``, whose tensors keep the caller's order."""

    layouts: tuple[Layout, ...]
    assignment: tuple[int, ...]

    @property
    def padding_ratio(self) -> float:
        """Padding of all buffers by the size of all tensors; 0 when there are no elements."""
        elements = sum(layout.num_elements for layout in self.layouts)
        return sum(layout.padding for layout in self.layouts) / elements if elements else 0.0


def split_group(group: Group, order: str, cap: int, max_buffers: int) -> BufferPlan:
    """At most ``max_buffers``: the buffer whose split saves most is split, while that saves :data:`MIN_SAVING`."""
    parts = [tuple(range(len(group.numels)))]
    saving = int(MIN_SAVING * sum(group.numels)) + 1

    def size(tensors: Sequence[int]) -> int:
        return plan_group(group.subset(tensors), order, cap).buffer_size

    while len(parts) < max_buffers:
        best, best_halves, best_part = saving - 1, None, -1
        for index, part in enumerate(parts):
            halves = _halves(group, part, order)
            if halves is not None and size(part) - size(halves[0]) - size(halves[1]) > best:
                best, best_halves, best_part = size(part) - size(halves[0]) - size(halves[1]), halves, index
        if best_halves is None:
            break
        parts[best_part : best_part + 1] = best_halves
    parts.sort()  # by their first tensors
    assignment = [0] * len(group.numels)
    for index, part in enumerate(parts):
        for i in part:
            assignment[i] = index
    return BufferPlan(tuple(plan_group(group.subset(part), order, cap) for part in parts), tuple(assignment))


def _halves(group: Group, part: Sequence[int], order: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The split of ``part`` whose two buffers are smallest, judged with small tables; None when it cannot be split."""

    def bound(tensors: Sequence[int]) -> int:
        problem = group.subset(tensors).problem
        return Bounds(problem).smallest() * problem.unit if problem.numels else 0

    splits = [(bound(first) + bound(second), first, second) for first, second in _splits(group, part)]
    best, halves = None, None
    for lower, first, second in sorted(splits):
        if best is not None and lower >= best:
            break
        shards = [plan_group(group.subset(half), order, FREE_STATES).shard_size for half in (first, second)]
        if best is None or sum(shards) < best:
            best, halves = sum(shards), (first, second)
    return halves


def _splits(group: Group, part: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Two non-empty halves of ``part``. Tensors of one block stay together; freely divisible ones of one size do."""
    solid: dict[int, list[int]] = {}
    fluid: dict[int, list[int]] = {}
    for i in part:
        if group.blocks[i] > 1:
            solid.setdefault(group.blocks[i], []).append(i)
        else:
            fluid.setdefault(group.numels[i], []).append(i)
    atoms = [solid[block] for block in sorted(solid, reverse=True)]
    if len(atoms) >= _MAX_ATOMS:  # by block size only
        ordered = [*atoms, [i for same in fluid.values() for i in same]]
        for cut in range(1, len(ordered)):
            first, second = ([i for atom in side for i in atom] for side in (ordered[:cut], ordered[cut:]))
            if first and second:
                yield tuple(sorted(first)), tuple(sorted(second))
        return
    sizes = sorted(fluid, key=lambda numel: -numel * len(fluid[numel]))
    alone = _MAX_ATOMS - len(atoms) - 1
    atoms += [fluid[numel] for numel in sizes[:alone]]
    if rest := [i for numel in sizes[alone:] for i in fluid[numel]]:
        atoms.append(rest)
    for chosen in range(1, 1 << max(0, len(atoms) - 1)):  # the last atom is always in the second half
        first = [i for bit, atom in enumerate(atoms) if chosen >> bit & 1 for i in atom]
        second = [i for bit, atom in enumerate(atoms) if not chosen >> bit & 1 for i in atom]
        yield tuple(sorted(first)), tuple(sorted(second))


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
        raise DBufferError(f"effort is {effort!r}; expected 'fast', 'thorough' or a positive number of table entries.")
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
    """Place tensors in a communication buffer so that no rank boundary divides a block, with as little padding as
    possible. A pure function of its arguments (and of whether the C++ helper is there, see ``effort``).

    All sizes are in elements. The problem and the padding figures are those of the veScale-FSDP paper, section 5; the
    paper's Algorithm 1 is ``order="default"``. Causes no communication.

    Args:
        numels: elements of each tensor; 0 is allowed.
        blocks: elements of each tensor's block, counted from the tensor's start, that must stay on one rank; 1 allows
            shard boundaries anywhere, a block of ``numel`` or more keeps the tensor whole. The last block may be short.
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
        max_buffers: above 1, tensors may be split over up to this number of buffers, and the result is a
            :class:`BufferPlan`, the tuple ``(layouts, assignment)``, also when one buffer turns out best. The split
            itself is a heuristic; ``optimal`` of each layout speaks of the tensors that it was given.

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
        raise DBufferError(
            f"plan_layout got {len(numels)} numels and {len(blocks)} blocks; each tensor needs one of each. Pass 1 as "
            "the block of a tensor that may be divided anywhere."
        )
    if order not in ("auto", "default"):
        raise DBufferError(f"order is {order!r}; expected 'auto' or 'default'. 'auto' is never worse.")
    group = Group(numels, blocks, num_shards, alignment, tensor_alignment)
    cap = table_cap(effort)
    if max_buffers == 1:
        return plan_group(group, order, cap)
    return split_group(group, order, cap, max_buffers)
