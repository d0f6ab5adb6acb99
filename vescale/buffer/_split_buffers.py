"""Several buffers for one group: tensors whose blocks do not go together stop paying for each other.

One buffer's shard size must suit every tensor that contains a whole shard, often the least common multiple of unlike
row sizes. Two buffers, each still contiguous and sent without copies, need not agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vescale.buffer._layout import Layout
from vescale.buffer._lower_bounds import Bounds
from vescale.buffer._plan_buffer import Group, plan_group
from vescale.buffer._shard_size_search import FREE_STATES

__all__ = ["MIN_SAVING", "BufferPlan", "split_group"]

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
