"""``Arrays``: bytes at the instants of a step, from the memory of a rank that has run one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from vescale.estimation import Block, MemoryTimeline

BACKWARD = ("backward", "recompute")


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters ZeRO gathers together, without ZeRO.

    Attributes:
        num_bytes: of parameters; ``trained``: of these, of those that are trained.
        times: how many equal units there are.
        runs_backward: whether a gradient reaches it.
    """

    num_bytes: int
    trained: float
    times: int
    runs_backward: bool


@dataclass(frozen=True)
class Arrays:
    """Bytes at the instants of a forward and backward, with a number of blocks.

    Attributes:
        other: all but parameters, gradients, optimizer states and ``casts``.
        casts: copies of parameters in another dtype. With ZeRO they are gathered in this dtype.
        gradients: whole ones; ``of_unit``: of these, those that the unit whose backward runs has made so far.
        running: parameters of the unit that runs, and after the backwards of all units of the last one of them.
        waiting: parameters of units whose backwards are not over, and of the last one of them.
        reduced: trained parameters of units whose backwards are over.
        in_backward, in_blocks: where each instant is.
        parameters: at rest, without ZeRO; ``largest``: of one of them; ``outer_parameters``: of those of no unit;
            ``late_parameters``: of these, those that the forward uses after the blocks.
        units: all of them; ``outer_share``: which part of the parameters of no unit is trained.
        saved: activations when the forward ends; ``early``: of these, those from before the blocks, which every stage of a
            pipeline computes.
    """

    other: np.ndarray
    casts: np.ndarray
    gradients: np.ndarray
    of_unit: np.ndarray
    running: np.ndarray
    waiting: np.ndarray
    reduced: np.ndarray
    in_backward: np.ndarray
    in_blocks: np.ndarray
    parameters: int
    largest: int
    outer_parameters: int
    late_parameters: int
    saved: int
    early: int
    units: tuple[Unit, ...] = ()
    outer_share: float = 1.0

    @property
    def trained(self) -> int:
        """Bytes of all gradients."""
        return int(self.gradients.max(initial=0))


def extended(two: Arrays, three: Arrays, num_blocks: int) -> Arrays:
    """The arrays of ``num_blocks`` blocks from those of two and of three."""

    def of(first: Any, second: Any) -> Any:
        return first + (num_blocks - 2) * (second - first)

    fixed = ("in_backward", "in_blocks", "units", "outer_share", "largest")
    grown = [one.name for one in fields(Arrays) if one.name not in fixed]
    units = tuple(replace(b, times=of(a.times, b.times)) for a, b in zip(two.units, three.units))
    return replace(three, units=units, **{name: of(getattr(two, name), getattr(three, name)) for name in grown})


def later_gradients(timeline: MemoryTimeline) -> np.ndarray:
    """Bytes of a later step: buckets, which the first backward ends with, stay from step to step."""
    found = timeline.categories["gradients"]
    begins = [one.block.begin for one in timeline.blocks if one.category == "gradients" and one.block.end is None]
    is_before = np.arange(len(found)) < min(begins, default=len(found))
    return found - timeline.waiting + np.where(is_before, found[-1], 0)


def _bytes_of(blocks: Iterable[Block], num_instants: int) -> np.ndarray:
    changes = np.zeros(num_instants + 1, dtype=np.int64)
    for one in blocks:
        changes[one.begin] += one.num_bytes
        changes[one.end if one.end is not None else num_instants] -= one.num_bytes
    return np.asarray(np.cumsum(changes)[:-1])


def gradients_of_unit(timeline: MemoryTimeline, unit_at: list[str]) -> np.ndarray:
    """Bytes of the gradients that a unit's backward has made so far, while it runs."""
    apart = [one.block for one in timeline.blocks if one.category == "gradients" and one.block.end is not None]
    made = _bytes_of(apart, len(timeline.instants))
    found = np.zeros_like(made)
    before, current = 0, ""
    for n, instant in enumerate(timeline.instants):
        if unit_at[n] and instant.phase in BACKWARD:
            if unit_at[n] != current:
                before, current = int(made[n - 1]), unit_at[n]
            found[n] = made[n] - before
    return found
