"""The offline simulation behind ``vescale advise``: every granularity, every group size, one buffer and two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vescale.buffer import Effort, GranularityTable, ModelShapes, Rows, Unit, plan_layout
from vescale.cli._optimizer_rule import OptimizerRule

__all__ = ["Advice", "Size", "Study", "study"]

TWO_BUFFERS_FROM = 0.01  # padding of one buffer from which two are tried


@dataclass(frozen=True)
class Size:
    """One group size. Ratios are padding by the size of all parameters, over all units of the model."""

    num_shards: int
    padding: float
    inherent: float  # the part of it that is proven unavoidable with one buffer for each unit
    two_buffers: float | None  # with up to two buffers for each unit; None where one wastes too little to try
    worst_unit: str  # whose units waste the most elements together
    worst_padding: float  # of one such unit by its own size

    @property
    def proven(self) -> bool:
        """No layout with one buffer for each unit is smaller by 0.01 % of the model."""
        return self.padding - self.inherent < 1e-4


@dataclass(frozen=True)
class Advice:
    """One granularity: ``rows`` of every matched matrix; ``refused``: why it cannot be kept."""

    rows: int
    sizes: tuple[Size, ...]
    refused: str | None = None

    def best(self) -> list[Size]:
        """The size with least padding in every octave [2^k, 2^(k+1)), the larger one of equals (to 0.01 points).

        Empty when no octave has a choice.
        """
        octaves: dict[int, Size] = {}
        for size in sorted(self.sizes, key=lambda size: -size.num_shards):
            octave = size.num_shards.bit_length()
            if octave not in octaves or size.padding < octaves[octave].padding - 1e-4:
                octaves[octave] = size
        return list(octaves.values()) if len(octaves) < len(self.sizes) else []

    def largest_within(self, padding: float) -> Size | None:
        return max((s for s in self.sizes if s.padding <= padding), key=lambda s: s.num_shards, default=None)


@dataclass(frozen=True)
class Study:
    """All results for one model."""

    model: ModelShapes
    pattern: str
    matched: tuple[str, ...]
    alignment: int
    effort: Effort
    advice: tuple[Advice, ...]
    rule: OptimizerRule | None = None
    """Whose blocks stay whole as well."""


@dataclass(frozen=True)
class _Planned:
    """One unit: its tensors, and how often the model has it."""

    unit: Unit
    numels: tuple[int, ...]
    blocks: tuple[int, ...]


def study(
    model: ModelShapes,
    rows: Sequence[int],
    num_shards: Sequence[int],
    *,
    pattern: str,
    across_experts: bool,
    alignment: int,
    effort: Effort,
    rule: OptimizerRule | None = None,
) -> Iterator[tuple[int, int] | Study]:
    """Yields (steps done, all steps) repeatedly, and the :class:`Study` at the end."""
    done, steps = 0, len(rows) * len(num_shards)
    advice = []
    for count in rows:
        try:
            units = _blocks(model, GranularityTable([(pattern, Rows(count, across_matrices=across_experts))]), rule)
        except ValueError as error:
            advice.append(Advice(count, (), str(error)))
            done += len(num_shards)
            yield done, steps
            continue
        sizes = []
        for shards in num_shards:
            sizes.append(_size(units, shards, alignment, effort))
            done += 1
            yield done, steps
        advice.append(Advice(count, tuple(sizes)))
    table = GranularityTable([(pattern, Rows(1))])
    matched = tuple(
        unit.full_name(name)
        for unit in model.units
        for name, shape in unit.parameters
        if table(unit.full_name(name), _Shape(shape)) is not None
    )
    yield Study(model, pattern, matched, alignment, effort, tuple(advice), rule)


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]


def _blocks(model: ModelShapes, table: GranularityTable, rule: OptimizerRule | None) -> list[_Planned]:
    together: Callable[[str, _Shape], int | None] = table
    if rule is not None:
        from vescale.optim import adamw8bit_layout  # loads torch

        of_optimizer = adamw8bit_layout(rule.block_size, block=rule.block, min_numel=rule.min_numel)

        together = lambda name, p: math.lcm(table(name, p) or 1, of_optimizer(name, p) or 1)  # noqa: E731

    return [
        _Planned(
            unit,
            tuple(math.prod(shape) for _, shape in unit.parameters),
            tuple(together(unit.full_name(name), _Shape(shape)) or 1 for name, shape in unit.parameters),
        )
        for unit in model.units
    ]


def _size(units: Sequence[_Planned], num_shards: int, alignment: int, effort: Effort) -> Size:
    elements = sum(planned.unit.count * sum(planned.numels) for planned in units)
    padding = bound = two = 0
    worst, worst_padding, most = "", 0.0, -1
    for planned in units:
        count = planned.unit.count
        layout = plan_layout(planned.numels, planned.blocks, num_shards, alignment, effort=effort)
        padding += count * layout.padding
        bound += count * (layout.lower_bound * num_shards - layout.num_elements)
        if count * layout.padding > most:
            worst, worst_padding, most = planned.unit.path, layout.padding_ratio, count * layout.padding
        if layout.padding_ratio < TWO_BUFFERS_FROM:
            two += count * layout.padding
        else:
            split = plan_layout(planned.numels, planned.blocks, num_shards, alignment, effort=effort, max_buffers=2)
            two += count * sum(part.padding for part in split.layouts)
    total = max(1, elements)
    return Size(
        num_shards=num_shards,
        padding=padding / total,
        inherent=bound / total,
        two_buffers=two / total if padding / total >= TWO_BUFFERS_FROM else None,
        worst_unit=worst,
        worst_padding=worst_padding,
    )
