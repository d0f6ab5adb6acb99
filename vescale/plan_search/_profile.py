"""One rank's step of a model with the first and the last of equal blocks, run by the estimator without numbers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale.comm import CommRecord
from vescale.compat import local_of, tree_leaves
from vescale.estimation import (
    Device,
    MemoryTimeline,
    OpSeconds,
    Rehearsal,
    Repeats,
    attention_of_gpu,
    bucket_shares,
    is_of_parameters,
    loss_of,
    make_batch,
    names_block,
    rehearse,
    routing_of,
    skeleton_of,
    timeline_of,
)
from vescale.ir import lower
from vescale.plans import Plan

__all__ = ["Arrays", "Profile", "profile_of"]


@dataclass(frozen=True)
class Arrays:
    """Bytes at the instants of a forward and backward, with a number of blocks.

    Attributes:
        other: all but parameters, gradients and optimizer states.
        gradients: whole ones.
        in_backward, in_blocks: where each instant is; ``is_late``: in the backward of the first block, or after it.
        parameters: at rest, without ZeRO; ``outer_parameters``: of these, those of modules that are no repeated blocks;
            ``late_parameters``: of these, those that the forward uses after the blocks.
        trained_shares: of the parameters of blocks, and of the others, which part is trained.
        saved: activations when the forward ends; ``early``: of these, those from before the blocks, which every stage of a
            pipeline computes.
    """

    other: np.ndarray
    gradients: np.ndarray
    in_backward: np.ndarray
    in_blocks: np.ndarray
    is_late: np.ndarray
    parameters: int
    outer_parameters: int
    late_parameters: int
    saved: int
    early: int
    trained_shares: tuple[float, float] = (1.0, 1.0)

    @property
    def trained(self) -> int:
        """Bytes of all gradients."""
        return int(self.gradients.max(initial=0))


@dataclass
class Profile:
    """What was seen of one rank, without ZeRO and stages.

    Attributes:
        rehearsal: the run; ``repeats``: the blocks that were left out.
        rows: of this rank; ``data_ranks``: along ``dp``.
        rounding: blocks of the allocator are multiples of so many bytes.
        message_bytes: of what the last block is given, as parts of this rank.
        num_tensors: parameters that the optimizer gets.
        late: paths of the modules with parameters that the forward uses after the blocks.
        trained_shares: see :class:`Arrays`.
    """

    rehearsal: Rehearsal
    repeats: tuple[Repeats, ...]
    rows: int
    data_ranks: int
    rounding: int
    message_bytes: int
    num_tensors: int
    late: frozenset[str]
    trained_shares: tuple[float, float] = (1.0, 1.0)
    ops: dict[tuple[int, str, str], OpSeconds] = field(default_factory=dict, repr=False)
    """Computed before."""
    _arrays: dict[int, Arrays] = field(default_factory=dict, repr=False)

    @property
    def num_blocks(self) -> int:
        return max((len(one.names) for one in self.repeats), default=0)

    def is_of_blocks(self, module: str | None) -> bool:
        return _is_inside(module, tuple(one.path for one in self.repeats))

    def part_of(self, module: str | None) -> str:
        """``blocks``, or ``late`` or ``early``: what the last stage or the first one has beside them."""
        if self.is_of_blocks(module):
            return "blocks"
        is_late = not module or any(module == path or module.startswith(f"{path}.") for path in self.late)
        return "late" if is_late else "early"

    def times_of(self, record: CommRecord) -> float:
        """How often a collective happens; of a bucket of gradients, how many times as much as what was run it moves."""
        if record.requester.startswith("bucket"):
            return self._shares.get(record.requester, 1.0)
        return next((one.count for one in self.repeats if names_block(record.requester, one)), 1)

    def repeats_with(self, num_blocks: int) -> tuple[Repeats, ...]:
        """The lists of blocks, the longest one with ``num_blocks`` of its blocks."""
        return tuple(
            replace(one, names=one.names[: num_blocks - 1] + one.names[-1:])
            if len(one.names) == self.num_blocks
            else one
            for one in self.repeats
        )

    def arrays(self, num_blocks: int) -> Arrays:
        """With so many blocks. Bytes grow by the same for each block beyond two."""
        if num_blocks not in self._arrays:
            if num_blocks <= 3 or self.num_blocks < 3:
                self._arrays[num_blocks] = self._arrays_of(self.repeats_with(num_blocks))
            else:
                self._arrays[num_blocks] = _extended(self.arrays(2), self.arrays(3), num_blocks)
        return self._arrays[num_blocks]

    def _arrays_of(self, repeats: tuple[Repeats, ...]) -> Arrays:
        timeline = timeline_of(self.rehearsal, repeats, self.rounding)
        own = np.array([n for n, i in enumerate(timeline.instants) if i.phase != "start"])
        end = timeline.end_of_forward(0)
        rest = sum(timeline.categories[name] for name in ("parameters", "gradients", "optimizer"))
        outer = [b for b in timeline.blocks if b.category == "parameters" and not self.is_of_blocks(b.module)]
        places = [timeline.instants[n] for n in own]
        in_backward = np.array([i.phase in ("backward", "recompute", "optimizer") for i in places], dtype=bool)
        in_first = np.array([any(one.holds(i.module) for one in repeats) for i in places], dtype=bool)
        return Arrays(
            other=(timeline.total - rest - _first_gradients(timeline))[own],
            gradients=self._gradients(timeline)[own],
            in_backward=in_backward,
            in_blocks=np.array([self.is_of_blocks(i.module) for i in places], dtype=bool),
            is_late=np.cumsum(in_first & in_backward) > 0,
            parameters=int(timeline.categories["parameters"][own[-1]]),
            outer_parameters=sum(one.block.num_bytes for one in outer),
            late_parameters=sum(one.block.num_bytes for one in outer if one.module in self.late),
            saved=int(timeline.categories["activations"][end]),
            early=self._early(timeline, end),
            trained_shares=self.trained_shares,
        )

    def _early(self, timeline: MemoryTimeline, end: int) -> int:
        """Activations that are there at the instant ``end`` and were before the first block ran."""
        inside = (n for n, i in enumerate(timeline.instants[:end]) if self.is_of_blocks(i.module))
        first = next(inside, 0)
        return sum(
            one.block.num_bytes
            for one in timeline.blocks
            if one.category == "activations"
            and one.block.begin < first
            and (one.block.end is None or one.block.end > end)
        )

    def _gradients(self, timeline: MemoryTimeline) -> np.ndarray:
        """Buckets stay from step to step."""
        found = timeline.categories["gradients"]
        return np.full_like(found, found.max(initial=0)) if self.gradient_records else found

    @functools.cached_property
    def _shares(self) -> dict[str, float]:
        return bucket_shares(self.rehearsal.in_buckets, self.repeats)

    @functools.cached_property
    def inner_records(self) -> list[CommRecord]:
        """Collectives of activations."""
        return [r for r in self.rehearsal.collectives if not is_of_parameters(r.requester)]

    @functools.cached_property
    def gradient_records(self) -> list[CommRecord]:
        """Those that reduce gradients of parameters, and others that compute hides."""
        return [r for r in self.rehearsal.collectives if is_of_parameters(r.requester)]


def _extended(two: Arrays, three: Arrays, num_blocks: int) -> Arrays:
    """The arrays of ``num_blocks`` blocks from those of two and of three."""

    def of(name: str) -> Any:
        first = getattr(two, name)
        return first + (num_blocks - 2) * (getattr(three, name) - first)

    grown = ("other", "gradients", "parameters", "outer_parameters", "late_parameters", "saved")
    return replace(three, **{name: of(name) for name in grown})


def _first_gradients(timeline: MemoryTimeline) -> np.ndarray:
    """Bytes of gradients beside their buckets, which are not there in the first backward; later ones write to them."""
    instants = timeline.instants
    first = min((one.block.begin for one in timeline.blocks if one.category == "gradients"), default=len(instants))
    found = np.zeros(len(instants) + 1, dtype=np.int64)
    for one in timeline.blocks:
        end = one.block.end if one.block.end is not None else len(instants)
        is_of_backward = instants[one.block.begin].phase in ("backward", "recompute")
        if one.category == "temporary" and is_of_backward and one.block.begin < first < end:
            found[one.block.begin] += one.block.num_bytes
            found[end] -= one.block.num_bytes
    return np.asarray(np.cumsum(found)[:-1])


def _is_inside(module: str | None, lists: tuple[str, ...]) -> bool:
    return module is not None and any(module.startswith(f"{path}.") for path in lists)


def _late_modules(model: nn.Module, repeats: tuple[Repeats, ...]) -> frozenset[str]:
    """By the order of the model's modules. A parameter with several names belongs to all of their modules."""
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    after = max((order[f"{one.path}.{one.names[-1]}"] for one in repeats), default=-1)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(own for paths in names.values() if any(order[p] > after for p in paths) for own in paths)


def _trained_shares(model: nn.Module, lists: tuple[str, ...]) -> tuple[float, float]:
    """Of the elements inside of ``lists``, and of the others, which part is trained."""
    elements = {(inside, trains): 0 for inside in (True, False) for trains in (True, False)}
    for name, parameter in model.named_parameters():
        elements[_is_inside(name, lists), parameter.requires_grad] += parameter.numel()
    blocks, others = (
        elements[inside, True] / max(elements[inside, True] + elements[inside, False], 1) for inside in (True, False)
    )
    return blocks, others


def profile_of(
    reduced: nn.Module,
    plan: Plan,
    batch: Mapping[str, Any],
    rows: int,
    repeats: tuple[Repeats, ...],
    *,
    device: Device,
    load: Any = 1.0,
    loss: Any = None,
) -> Profile:
    """Run rank 0 without numbers. Raises what the model or the plan raises.

    Args:
        reduced: on the meta device, with the first and the last of the blocks in ``repeats``.
        plan: without ZeRO and pipeline.
        batch: global, of as many rows as the plan's ranks take with ``rows`` each.
    """
    program = lower(plan, reduced)
    model = skeleton_of(reduced)
    seen: list[int] = []

    def note(_module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
        sizes = [local_of(x) if isinstance(x, DTensor) else x for x in given]
        seen.append(sum(x.numel() * x.element_size() for x in sizes))

    hooks = [
        model.get_submodule(f"{one.path}.{one.names[-1]}").register_forward_pre_hook(note, with_kwargs=True)
        for one in repeats
    ]
    inputs = make_batch(model, batch, with_labels=loss is None)
    num_tensors = len({id(p) for p in model.parameters() if p.requires_grad})
    per_block = [
        sum(p.requires_grad for p in model.get_submodule(r.stand_in).parameters()) * (r.count - 1) for r in repeats
    ]
    late = _late_modules(model, repeats)
    shares = _trained_shares(model, tuple(one.path for one in repeats))
    rehearsal = rehearse(
        model,
        plan,
        program.axes,
        0,
        inputs,
        None,
        loss or loss_of,
        num_steps=1,
        routing=routing_of(program, load, 0),
        attention=attention_of_gpu() if device.is_gpu else None,
    )
    for hook in hooks:
        hook.remove()
    return Profile(
        rehearsal,
        repeats,
        rows,
        plan.axes.size("dp") if "dp" in plan.axes else 1,
        device.rounding_bytes,
        seen[0] if seen else 0,
        num_tensors + sum(per_block),
        late,
        shares,
    )
