"""What of a rank's parameters is padding, and which blocks would leave less."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from torch import nn

from vescale.buffer import Layout, plan_layout
from vescale.ir import Program, UnitBucket, unit_buckets

__all__ = ["padding_note"]

_NOTED = 0.1
"""The share of a rank's parameters from which on padding is worth a note."""


def padding_note(program: Program, model: nn.Module, padding: int, parameters: int) -> str | None:
    """A sentence with the entry that leaves least padding; None where there is little of it.

    Args:
        program: of the plan; ``model``: its shapes.
        padding: bytes of a rank; ``parameters``: with it.
    """
    if padding <= _NOTED * parameters:
        return None
    begin = (
        f"of {parameters:,} bytes of parameters of a rank, {padding:,} are padding, because blocks that stay whole do not "
        "fill the ranks"
    )
    buckets = [one for one in unit_buckets(program, model) if not one.parts]
    worst = max(buckets, key=lambda one: one.padding_elements * one.dtype.itemsize, default=None)
    found = _with_rows(worst, model) if worst is not None else None
    if worst is None or found is None:
        return f"{begin}: use fewer ranks, or shard over a part of them (hybrid sharding); see vescale advise"
    layout, blocks = found
    axes = ", ".join(f"{axis}: Ragged(block={{}})" for axis in worst.shard)
    edits = "; ".join(f"{_pattern(names)}: {{{axes.format(size)}}}" for size, names in blocks.items())
    total = sum(layout.numels)
    before, after = (size / total - 1 for size in (worst.buffer_size, layout.shard_size * worst.num_ranks))
    return (
        f"{begin}. Smaller blocks, {edits} at init in place of what shards these now, leave {after:.1%} padding in the "
        f"unit {worst.path!r}, which has {before:.1%}"
    )


def _with_rows(bucket: UnitBucket, model: nn.Module) -> tuple[Layout, dict[int, list[str]]] | None:
    """The layout with blocks of one row of the last dim, and the names of the parameters that get them, by block; None
    where that leaves at least half of the padding."""
    layout = bucket.layout
    shapes = {name: tuple(model.get_parameter(name).shape) for name in bucket.names}
    whole = layout.shard_size
    blocks = list(layout.blocks)
    changed: dict[int, list[str]] = {}
    for n, (name, block) in enumerate(zip(bucket.names, layout.blocks)):
        row = shapes[name][-1] if shapes[name] else 1
        # Blocks of a shard's size, or nearly, are what leaves gaps.
        if row < block and block % row == 0 and 8 * block > sum(layout.numels) // layout.num_shards:
            blocks[n] = row
            changed.setdefault(row, []).append(name)
    if not changed:
        return None
    found = plan_layout(
        layout.numels, blocks, layout.num_shards, layout.alignment, tensor_alignment=layout.tensor_alignment
    )
    total = sum(layout.numels)
    if 2 * (found.shard_size * found.num_shards - total) > whole * layout.num_shards - total:
        return None
    return found, changed


def _pattern(names: list[str]) -> str:
    """One path expression for some parameters: numbers of layers become ``\\d+``."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name) for name in names)
    if len(kinds) == 1:
        return next(iter(kinds))
    parts = [kind.split(".") for kind in sorted(kinds)]
    shared = list(itertools.takewhile(lambda of: len(set(of)) == 1, zip(*parts)))
    ends = "|".join(".".join(own[len(shared) :]) for own in parts)
    return ".".join([*(of[0] for of in shared), f"({ends})"])
