"""``--optimizer``: the rule of block-wise optimizers, that no boundary between ranks may cut a block, for ``lint``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import regex

from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.tensor.placement_types import Placement

    from vescale.ir import Finding
    from vescale.optim import Blocks
    from vescale.plans import Plan

_FORM = "adamw8bit, adamw8bit:block_size=128,min_numel=4096 or adamw8bit:block=32x2048"


@dataclass(frozen=True)
class OptimizerRule:
    """The arguments of ``AdamW8bit`` that decide about blocks."""

    block_size: int = 256
    block: tuple[int, int] | None = None
    min_numel: int = 4096


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--optimizer",
        metavar="NAME",
        help=f"check that no rank boundary divides a block of a block-wise quantized optimizer: {_FORM}",
    )


def parse_optimizer(text: str | None) -> OptimizerRule | None:
    """Raises UsageError for a name or option that there is not."""
    if text is None:
        return None
    name, _, options = text.partition(":")
    found: dict[str, int | tuple[int, int]] = {}
    for option in options.split(",") if options else ():
        match = regex.fullmatch(r"(block_size|min_numel)=(\d+)|(block)=(\d+)x(\d+)", option.strip())
        if match is None or (match[2] == "0" and match[1] == "block_size") or "0" in (match[4], match[5]):
            raise UsageError(f"--optimizer {text!r}: {option!r} is not an option; write {_FORM}.")
        if match[1]:
            found[match[1]] = int(match[2])
        else:
            found["block"] = int(match[4]), int(match[5])
    if name != "adamw8bit":
        raise UsageError(f"--optimizer {text!r}: only adamw8bit has blocks; write {_FORM}.")
    return OptimizerRule(**found)  # type: ignore[arg-type]


def block_findings(plan: Plan, model: nn.Module, rule: OptimizerRule) -> tuple[Finding, ...]:
    """Errors (rule ``optimizer-block``) about trainable parameters whose cut at rest would cut a block; the same problem of
    several layers is one finding.

    Of a ragged placement without units, which the layout planner decides, the granule must be whole blocks.
    """
    from vescale.ir import Finding, Place, lower, name_list
    from vescale.optim import blocks_of

    blocks = blocks_of({"block_size": rule.block_size, "block": rule.block})
    program = lower(plan, model)
    parameters = dict(model.named_parameters())
    merged: dict[tuple[str, object], list[str]] = {}
    for instruction in program:
        name = ".".join(filter(None, (instruction.path, instruction.target)))
        parameter = parameters.get(name)
        if not isinstance(instruction.op, Place) or parameter is None or not parameter.requires_grad:
            continue
        if parameter.numel() < max(1, rule.min_numel):
            continue
        placements = [p for p in instruction.op.placements if p is not None]
        problem = _problem(blocks, tuple(parameter.shape), placements, program.axes.sizes, tuple(program.axes))
        if problem is not None:
            merged.setdefault((problem, instruction.source), []).append(name)
    return tuple(
        Finding("error", "optimizer-block", problem.replace("{names}", name_list(names)), source, tuple(names))  # type: ignore[arg-type]
        for (problem, source), names in merged.items()
    )


def _problem(
    blocks: Blocks,
    shape: tuple[int, ...],
    placements: Sequence[Placement],
    sizes: tuple[int, ...],
    axes: tuple[str, ...],
) -> str | None:
    from torch.distributed.tensor import Replicate

    from vescale.ir import join_placements, ragged_positions
    from vescale.placements import RaggedShard, largest_shape, shard_dim

    others = [Replicate() if isinstance(p, RaggedShard) else p for p in placements]
    cut = blocks.first_cut(shape, others, sizes)
    if cut is not None:
        where = ", ".join(f"{p} on {axis}" for p, axis in zip(others, axes) if not p.is_replicate())
        return (
            f"{{names}} of shape {shape}: {where} divides block {cut.block} ({cut.elements}) of AdamW8bit's {blocks}; "
            "put these parameters into a param group with smaller blocks, or shard another dim"
        )
    positions = ragged_positions(placements)
    if not positions:
        return None
    joined, joined_sizes = join_placements(placements, sizes, positions)
    ragged = placements[positions[0]]
    assert isinstance(ragged, RaggedShard)
    held = largest_shape(shape, tuple(others), sizes)
    if ragged.local_units is not None:
        cut = blocks.first_cut(shape, joined, joined_sizes)
        if cut is None:
            return None
        found = f"block {cut.block} ({cut.elements})"
    else:
        granule = ragged.granule(held, [dim for p in others if (dim := shard_dim(p)) is not None and dim > 0])
        if granule % blocks.granule(held) == 0 or granule >= math.prod(held):
            return None
        found = f"shares of {granule} elements"
    where = ",".join(axes[position] for position in positions)
    return (
        f"{{names}} of shape {shape}: {ragged} on {where} may divide blocks of AdamW8bit ({blocks}): {found}; write "
        f"Ragged(block={blocks.granule(held)}) at rest (in Python RaggedShard(block={blocks.granule(held)}))"
    )
