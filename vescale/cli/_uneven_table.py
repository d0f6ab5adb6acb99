"""The table of ``vescale explain`` of dims that ranks hold in parts of unequal size."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale.cli._console import new_table

if TYPE_CHECKING:
    from torch import nn

    from vescale.ir import Program


class UnevenRow(NamedTuple):
    """A parameter, buffer or input; ``sizes`` by rank of ``axis``; ``number`` of repeated layers that have it alike."""

    name: str
    dim: int
    axis: str
    sizes: tuple[int, ...]
    number: int


def uneven_rows(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> list[UnevenRow]:
    """Of ``inputs``, whole tensors by name, then of the model's parameters and buffers."""
    from vescale.ir import merge_repeats, uneven_cuts, uneven_inputs

    found = [UnevenRow(cut.name, cut.dim, cut.axis, cut.sizes, 1) for cut in uneven_inputs(program, model, inputs)]
    rows = ((cut.name, (cut.dim, cut.axis, cut.sizes)) for cut in uneven_cuts(program, model))
    return found + [UnevenRow(name, dim, axis, sizes, count) for name, (dim, axis, sizes), count in merge_repeats(rows)]


def uneven_table(rows: Sequence[UnevenRow]) -> Any:
    table = new_table("cut unevenly", "dim", "over", "sizes by rank", "number", right=("dim", "number"))
    for row in rows:
        table.add_row(row.name, str(row.dim), row.axis, _runs(row.sizes), str(row.number))
    return table


def _runs(sizes: Sequence[int]) -> str:
    """``3, 3, 3, 1`` as ``3 x 3, 1``: how many ranks, and what each of them holds."""
    groups = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    return ", ".join(f"{count} x {size:,}" if count > 1 else f"{size:,}" for size, count in groups)
