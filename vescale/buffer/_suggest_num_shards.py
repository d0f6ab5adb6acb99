"""``suggest_num_shards``: the group sizes that waste least, found before a job starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale.buffer._layout import integers
from vescale.buffer._planner import BufferPlan, Effort, plan_layout
from vescale.errors import LayoutPlanningError


@dataclass(frozen=True)
class ShardSuggestion:
    """One group size.

    ``padding_ratio`` is what the planned buffers waste by the size of the tensors, ``inherent_ratio`` the part of it
    that is proven unavoidable with these buffers; they are equal where every layout is proven optimal.
    """

    num_shards: int
    num_buffers: int
    padding_ratio: float
    inherent_ratio: float
    largest_within: bool
    """No larger candidate pads as little: the choice is between these and smaller padding."""


def suggest_num_shards(
    numels: Sequence[int],
    blocks: Sequence[int],
    candidates: Iterable[int],
    alignment: int,
    *,
    tensor_alignment: int = 1,
    effort: Effort = "fast",
    max_buffers: int = 1,
) -> tuple[ShardSuggestion, ...]:
    """Plan one group for every candidate ``num_shards`` and return them, least padding first, larger groups first
    among equals.

    The arguments are those of :func:`plan_layout`. Causes no communication.

    Args:
        numels, blocks, alignment, tensor_alignment, effort, max_buffers: as of :func:`plan_layout`.
        candidates: numbers of shards to try.

    Raises:
        TypeError, ValueError: as ``plan_layout``; or there are no candidates.
    """
    sizes = sorted(set(integers("candidates", candidates, at_least=1)))
    if not sizes:
        raise LayoutPlanningError(
            "candidates is empty; expected at least one number of shards. Pass for example (64, 128, 256)."
        )
    suggestions: list[ShardSuggestion] = []
    best = float("inf")
    for num_shards in reversed(sizes):
        plan = plan_layout(
            numels,
            blocks,
            num_shards,
            alignment,
            tensor_alignment=tensor_alignment,
            effort=effort,
            max_buffers=max_buffers,
        )
        layouts = plan.layouts if isinstance(plan, BufferPlan) else (plan,)
        bound = sum(layout.lower_bound for layout in layouts) * num_shards
        elements = sum(layout.num_elements for layout in layouts)
        padding = plan.padding_ratio
        suggestions.append(
            ShardSuggestion(
                num_shards=num_shards,
                num_buffers=len(layouts),
                padding_ratio=padding,
                inherent_ratio=(bound - elements) / elements if elements else 0.0,
                largest_within=padding < best,
            )
        )
        best = min(best, padding)
    return tuple(sorted(suggestions, key=lambda s: (s.padding_ratio, -s.num_shards)))
