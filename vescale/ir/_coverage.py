"""``coverage(plan, model)``: how much of a model a plan places."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from vescale.ir._findings import Findings
from vescale.ir._merged_names import merge_repeats
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._resolve import resolve
from vescale.plans import Plan

__all__ = ["Coverage", "coverage"]


@dataclass(frozen=True)
class Coverage:
    """What share of a model a plan places.

    Attributes:
        parameters: of all elements of parameters, those in tensors that are cut while they compute.
        activations: of the called modules that have parameters of their own, those whose input or output an entry places:
            at the module or at one around it, below the model itself. The others take what comes and hand out what
            DTensor makes of it.
        whole: parameters that no axis cuts and their elements, largest first, repeated layers as one.
    """

    parameters: float
    activations: float
    whole: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        largest = ", ".join(f"{name} ({size:,})" for name, size in self.whole[:5])
        return (
            f"{self.parameters:.1%} of the parameters are cut, {self.activations:.1%} of the modules' activations are placed"
            + (f"; whole, of the largest: {largest}" if largest else "")
        )


def coverage(plan: Plan, model: nn.Module) -> Coverage:
    """What share of ``model`` the plan places; reads names and shapes only. An axis of one rank counts like any other.

    Args:
        plan: the plan whose entries are counted.
    """
    index = ModelIndex(model)
    resolution = resolve(plan, index, Findings())
    cut = whole = 0
    sizes: list[tuple[str, int]] = []
    for name, own in resolution.states.items():
        state = index.states[name]
        if not state.is_parameter or state.shape is None:
            continue
        size = math.prod(state.shape)
        if all(placement.is_replicate() for placement in own.running(plan.axes)):
            whole += size
            sizes.append((name, size))
        else:
            cut += size
    planned = {path for path, _, _ in resolution.boundaries if path} | {path for path in resolution.locals if path}
    owners = {index.owner(name)[0] for name, state in index.states.items() if state.is_parameter}
    called = [path for path in owners if index.is_called(path)]
    placed = [path for path in called if not planned.isdisjoint(enclosing(path))]
    merged: dict[str, int] = {}
    for pattern, size, times in merge_repeats(sizes):
        merged[pattern] = merged.get(pattern, 0) + (size or 0) * times
    return Coverage(
        cut / (cut + whole) if cut + whole else 1.0,
        len(placed) / len(called) if called else 1.0,
        tuple(sorted(merged.items(), key=lambda item: -item[1])),
    )
