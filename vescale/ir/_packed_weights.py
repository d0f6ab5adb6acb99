"""Finds dims of a model's weights that hold several things one after the other (fused query, key and value; gate and up).

The forward runs on meta tensors, and the features that a weight produces are followed through elementwise ops and views
until the code splits them. Names do not matter. Features that are first viewed as heads, and then split inside of each
head, are not packed: an ordinary shard ends between heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from vescale.ir._feature_trace import Features, FeatureTrace
from vescale.ir._findings import Findings, Repeats, repeats_of
from vescale.ir._model_index import ModelIndex
from vescale.ir._resolve import Resolution, shown_name
from vescale.plans import Plan


@dataclass(frozen=True)
class Packing:
    """A dim of a parameter that a model takes apart: into so many equal parts; 0: into parts of different sizes."""

    name: str
    dim: int
    num_parts: int


def packed_dims(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[Packing, ...]:
    """The dims that ``model(**inputs)`` splits, in the order of the forward; model and inputs are on the meta device.

    If the forward raises on meta tensors, the dims found until then are returned. Of equal layers that follow each other,
    the first and the last run, and the first stands for the others.
    """
    runs: Sequence[Repeats] = repeats_of(model)
    with _without_repeats(model, runs):
        trace = _traced(model, inputs)
    if trace.stopped:  # a forward that counts its layers, or has no values: the whole one runs
        trace, runs = _traced(model, inputs), ()
    return trace.packings(runs)


def _traced(model: nn.Module, inputs: Mapping[str, Any]) -> _PackingTrace:
    trace = _PackingTrace(ModelIndex(model), 1)
    trace.run(inputs)
    return trace


@contextlib.contextmanager
def _without_repeats(model: nn.Module, runs: Sequence[Repeats]) -> Iterator[None]:
    """Inside, lists lack the layers between the first and the last of each run."""
    lists = [(model.get_submodule(run.path), run) for run in runs]
    before = [dict(modules._modules) for modules, _ in lists]
    try:
        for modules, run in lists:
            for name in run.names[1:-1]:
                del modules._modules[name]
        yield
    finally:
        for (modules, _), kept in zip(reversed(lists), reversed(before)):
            modules._modules.clear()
            modules._modules.update(kept)


def lint_packed(
    plan: Plan, resolution: Resolution, index: ModelIndex, inputs: Mapping[str, Any], findings: Findings
) -> None:
    """Warn of packed dims that are cut as one: a rank would have some of the parts, and the model takes all of each."""
    for packing in packed_dims(index.model, inputs):
        planned = resolution.states[packing.name]
        for axis, placement in zip(plan.axes, planned.running(plan.axes)):
            if type(placement) is not Shard or placement.dim != packing.dim or plan.axes.size(axis) == 1:
                continue
            choice = planned.running_at(axis)
            if choice is None or _is_gathered(packing.name, axis, resolution, index):
                continue
            write = (
                f"'{choice.entry.path}': {{{axis}: Interleaved({packing.dim}, {packing.num_parts})}}, which shards each"
            )
            findings.warning(
                "packed",
                f"{{names}} is sharded S({packing.dim}) over '{axis}', but the model splits its output along that "
                f"dim, into {packing.num_parts or 'unequal'} parts, of which each rank would have only some, and "
                "would have to communicate the others; write "
                f"{write if packing.num_parts else f'{{{axis}: R}}, or use a separate weight for each part'}",
                choice.entry.source,
                shown_name(index.states[packing.name]),
            )


def _is_gathered(name: str, axis: str, resolution: Resolution, index: ModelIndex) -> bool:
    """Whether the module's own ``<out>`` entry brings all parts to every rank."""
    path = index.owner(name)[0]
    outputs = (planned for (at, side, _), planned in resolution.boundaries.items() if (at, side) == (path, "<out>"))
    found = [choice for planned in outputs if (choice := planned.dst.get(axis)) is not None]
    return any(isinstance(choice.placement, Replicate) for choice in found)


class _PackingTrace(FeatureTrace):
    """Features are followed also where they cannot be cut.

    Attributes:
        found: (name, dim) of weights -> into how many parts their features are taken apart.
    """

    def __init__(self, index: ModelIndex, num_ranks: int) -> None:
        super().__init__(index, num_ranks)
        self.found: dict[tuple[str, int], int] = {}

    def packings(self, runs: Sequence[Repeats]) -> tuple[Packing, ...]:
        """What was found, in the layers that ``runs`` have left out, too."""
        packings = []
        for (name, dim), num_parts in self.found.items():
            run = next((run for run in runs if run.holds(name)), None)
            ends = [name] if run is None else [f"{path}{name[len(run.stand_in) :]}" for path in run.paths()]
            packings += [Packing(each, dim, num_parts) for each in ends]
        return tuple(packings)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if name in ("conv1d", "conv2d") and args[1] in self._weights:
            weight = self._noted(self._weights[args[1]][0], args[2] if len(args) > 2 else None, 0, 1).weight
            self._features[result] = Features(weight, (1,))
        elif name in ("layer_norm", "rms_norm"):
            self._elementwise(name, args, kwargs, result)
        else:
            super().follow(name, args, kwargs, result)

    def _of(self, tensor: Any) -> Features | None:
        return self._features.get(tensor) if isinstance(tensor, torch.Tensor) else None

    def _note_parts(self, features: Features, num_parts: int) -> None:
        if not features.is_part and num_parts != 1:
            for name, (dim, holds_all) in self.groups.of(features.weight).members.items():
                if holds_all:
                    is_same = self.found.setdefault((name, dim), num_parts) == num_parts
                    self.found[name, dim] = num_parts if is_same else 0
