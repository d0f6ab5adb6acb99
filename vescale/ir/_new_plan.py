"""``new_plan``: a first plan for a model without one, from a forward on the meta device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from vescale.errors import DerivedPlanError
from vescale.ir._feature_trace import trace_features
from vescale.ir._findings import Findings, merge_repeats
from vescale.ir._lower import check
from vescale.ir._model_copy import copy_model, example_inputs
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._resolve import resolve
from vescale.ir._tensor_cuts import Cut, choose_cuts, shard_tokens
from vescale.placements import RaggedShard
from vescale.plans import (
    BATCHED_INPUTS,
    INIT,
    RUN,
    MeshAxes,
    Plan,
    Source,
    expressions,
    merged_paths,
    plan_text,
    wildcard,
)

# ``coverage(plan, model)``: how much of a model a plan places.


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
            f"{self.parameters:.1%} of the parameters are sharded, and {self.activations:.1%} of the modules' outputs have "
            "entries" + (f"; the largest replicated ones: {largest}" if largest else "")
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


# Names of axes that carry the batch.
_BATCH_AXES = ("dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard", "data")
_SOURCE = Source("new_plan", 0)


class NewPlan(Plan):
    """A plan that :func:`new_plan` has written.

    Attributes:
        comments: why, by the path of an entry.
        head: lines at the top of its YAML: how much is cut, and what stays whole and why.
    """

    comments: dict[str, str]
    head: list[str]

    def to_yaml(self) -> str:
        """The plan as YAML text with comments; ``Plan.from_yaml(plan.to_yaml()) == plan``."""
        return plan_text(self, self.comments, self.head)


def new_plan(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int] | MeshAxes,
    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None = None,
    *,
    sequence: bool = False,
    zero: int = 0,
    axis: str = "tp",
    batch_axes: Sequence[str] | None = None,
) -> NewPlan:
    """Write a first plan for a model: the batch is sharded over data-parallel axes, and weights over ``axis``.

    The forward runs once on the meta device. Weights whose features stay together (query, key, value and attention's output;
    a feed-forward with its gate; fused ones that the code splits) are sharded in pairs, by output features and by input
    features, so that one sum ends each pair. Vocabulary tables, heads of that size and experts are sharded, too.
    Convolutions, norms and whatever mixes features otherwise stay whole. What ``vescale lint`` finds fault with is left out,
    so that the plan has no findings, unless nothing can be sharded over an axis at all.

    Args:
        model: on any device, also the meta device; it is not changed, and nothing is computed.
        mesh: a DeviceMesh with axis names, or ``{axis: size}``.
        inputs: what the forward is called with, by name or position; only shapes and dtypes are read. None: token ids or
            images, by the model's config and signature.
        sequence: shard the sequence over ``axis`` between the parts of each layer, where the code allows it.
        zero: 0, or the stage of sharding of optimizer state (1), gradients (2) and parameters (3) over the batch's axes.
        axis: the axis of tensor parallelism, if the mesh has it.
        batch_axes: axes over which the batch (dim 0 of the inputs) is sharded; None: those of the mesh called ``dp``,
            ``fsdp`` and so on.

    Raises:
        PlanError: an axis that has no part, a stage that does not exist, a forward that does not run on the meta device,
            inputs that cannot be guessed.
    """
    plan = NewPlan(mesh)
    plan.comments, plan.head = {}, []
    data = _checked_axes(plan.axes, axis, batch_axes)
    if zero not in (0, 1, 2, 3):
        raise DerivedPlanError(f"new_plan: zero={zero!r}; pass 0 (nothing sharded), 1, 2 or 3")
    if zero and not data:
        raise DerivedPlanError(
            f"new_plan: zero={zero} shards over the batch's axes, and the mesh ({plan.axes}) has none; add dp="
        )
    meta = on_meta(model)
    given = _named(meta, inputs) if inputs is not None else example_inputs(meta)
    num_ranks = plan.axes.size(axis) if axis in plan.axes else 1
    trace = trace_features(meta, given, num_ranks)
    if trace.stopped:
        raise DerivedPlanError(
            f"new_plan: the forward of {type(model).__name__} does not run on the meta device: {trace.stopped}; it was "
            f"called with {_described(given)}. Pass other inputs (indices are integers: torch.int64, on the command line "
            "--input NAME=SHAPE:int64), or write the plan by hand"
        )
    cuts, whole = choose_cuts(trace) if axis in plan.axes else ([], {})
    notes: list[str] = []
    if sequence and axis in plan.axes:
        notes += shard_tokens(meta, given, cuts, trace)
    dropped: list[str] = []
    while True:
        written = _written(plan, meta, given, cuts, data, zero, axis)
        names = {name for f in check(written, meta, given) if f.rule != "unused-axis" for name in f.names}
        faulty = [cut for cut in cuts if cut.concerns(names)]
        if not faulty:
            break
        dropped += [f"{cut.title} is replicated: lint would report an error" for cut in faulty]
        cuts = [cut for cut in cuts if cut not in faulty]
    head = [f"Written by `vescale plan new` for {type(model).__name__}: {coverage(written, meta)}"]
    reasons: dict[str, list[str]] = {}
    for name, why in whole.items():
        reasons.setdefault(why, []).append(wildcard(name))
    head += [f"Replicated, because {why}: {', '.join(dict.fromkeys(names))}" for why, names in reasons.items()]
    written.head = head + list(dict.fromkeys(dropped)) + notes
    return written


def _checked_axes(axes: MeshAxes, axis: str, batch_axes: Sequence[str] | None) -> list[str]:
    """The axes of the batch; every axis must have a part."""
    data = [name for name in axes if name in (_BATCH_AXES if batch_axes is None else batch_axes) and name != axis]
    unknown = [name for name in batch_axes or () if name not in axes]
    unused = [name for name in axes if name != axis and name not in data and axes.size(name) > 1]
    if unknown:
        raise DerivedPlanError(f"new_plan: batch_axes names {unknown[0]!r}, which the mesh ({axes}) does not have")
    if unused:
        raise DerivedPlanError(
            f"new_plan: axis {unused[0]!r} of the mesh ({axes}) is unused; axes of the batch are "
            f"{', '.join(_BATCH_AXES)} (or batch_axes=), and that of tensor parallelism is {axis!r} (or axis=)"
        )
    return data


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of the model without memory, in evaluation: no layer is left out at random."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy_model(model, memo).eval()


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Inputs by name, on the meta device."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, Mapping):
        names = list(inspect.signature(model.forward).parameters)
        inputs = dict(zip(names, inputs))
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def _described(given: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} ({str(x.dtype).removeprefix('torch.')} {list(x.shape)})"
        if isinstance(x, torch.Tensor)
        else f"{name}={x!r}"
        for name, x in given.items()
    )


def _batched(model: nn.Module, given: Mapping[str, Any]) -> list[str]:
    """Inputs whose dim 0 is the batch. Masks and positions are not among them: whole, they need no communication."""
    sizes = [x.shape[0] for x in given.values() if isinstance(x, torch.Tensor) and x.ndim]
    names = [
        name
        for name, x in given.items()
        if isinstance(x, torch.Tensor)
        and x.ndim
        and x.shape[0] == sizes[0]
        and not name.endswith(("_mask", "position_ids"))
    ]
    signature = inspect.signature(model.forward).parameters
    return list(dict.fromkeys([*names, *(name for name in BATCHED_INPUTS if name in signature)]))


def _written(
    like: NewPlan, model: nn.Module, given: Mapping[str, Any], cuts: list[Cut], data: list[str], zero: int, axis: str
) -> NewPlan:
    plan = NewPlan(like.axes)
    plan.comments, plan.head = {}, []
    index = ModelIndex(model)
    for number, name in enumerate(_batched(model, given) if data else ()):
        plan.shard(f"<in:{name}>", {each: Shard(0) for each in data}, source=_SOURCE)
        if number == 0:
            plan.comments[f"<in:{name}>"] = (
                f"The batch, over {' and '.join(data)}. Inputs without an entry are replicated."
            )
    kinds: dict[tuple[str, str], list[Cut]] = {}
    for cut in cuts:
        kinds.setdefault((cut.title, cut.why), []).append(cut)
    for (_, why), alike in kinds.items():
        tensors = {key: placement for cut in alike for key, placement in cut.tensors.items()}
        for number, (path, placement) in enumerate(merged_paths(tensors, index.modules)):
            plan.shard(path, placement, mesh=axis, source=_SOURCE)
            if number == 0:
                plan.comments.setdefault(path, why)
        for path in expressions([path for cut in alike for path in cut.experts], index.modules):
            plan.local(path, kind="experts", dispatch="mask", source=_SOURCE)
    if zero:
        plan.shard(".*", {each: RaggedShard() for each in data}, phase=INIT, source=_SOURCE)
        plan.shard(".*", {each: Replicate() for each in data}, phase=RUN, source=_SOURCE)
        plan.comments[".*"] = _ZERO[zero]
        if zero < 3:
            for path in _units(index):
                plan.unit(
                    path,
                    reshard_after_forward=False,
                    reshard_after_backward=None if zero == 2 else False,
                    source=_SOURCE,
                )
    return plan


_ZERO = {
    1: "ZeRO-1: each rank keeps a part of the optimizer's state and of the reduced gradients.",
    2: "ZeRO-2: each rank keeps a part of the gradients and of the optimizer's state.",
    3: "ZeRO-3: each rank keeps a part of the parameters, gradients and optimizer's state; units gather them to compute.",
}


def _units(index: ModelIndex) -> list[str]:
    """Expressions for the repeated blocks, and the model itself."""
    blocks = [
        path
        for path in index.modules
        if path and isinstance(index.modules[path.rpartition(".")[0]], nn.ModuleList) and index.is_called(path)
    ]
    outermost = [p for p in blocks if not any(p.startswith(f"{other}.") for other in blocks)]
    return [*dict.fromkeys(wildcard(path).replace("*", r"\d+") for path in outermost), ""]
