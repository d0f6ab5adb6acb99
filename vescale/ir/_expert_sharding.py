"""The role of each mesh axis in a region of experts, by the placements of the parameters while the module runs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._resolve import Resolution, shown_name
from vescale.placements import shard_dim
from vescale.plans import LocalEntry, MeshAxes, placement_text


@dataclass(frozen=True)
class ExpertCut:
    """How the experts of one module are cut.

    Attributes:
        experts: axes over which whole experts are spread: every parameter is ``Shard(0)`` there.
        num_experts: how many there are; 0 where none are spread.
        features: axes along which every expert is cut, on later dims.
        biases: of these, parameters that are whole along an axis of features: they belong to the sum that the ranks'
            results add up to, and only the first rank adds them. Names relative to the module.
    """

    experts: tuple[str, ...] = ()
    num_experts: int = 0
    features: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertTensor:
    """One parameter of a module of experts, with its placements while the module runs."""

    name: str
    shape: tuple[int, ...]
    running: tuple[Placement, ...]

    def dim(self, axis: int) -> int | None:
        """The dim that the axis cuts."""
        return shard_dim(self.running[axis])


def expert_tensors(path: str, resolution: Resolution, index: ModelIndex, axes: MeshAxes) -> list[ExpertTensor]:
    """The parameters of a module and of all in it; names relative to it."""
    prefix = f"{path}." if path else ""
    found = []
    for name, planned in resolution.states.items():
        state = index.states[name]
        alias = next((alias for alias in state.names if alias.startswith(prefix)), None)
        if alias is not None and state.is_parameter and state.shape is not None:
            found.append(ExpertTensor(alias.removeprefix(prefix), state.shape, planned.running(axes)))
    return found


def find_expert_cuts(
    resolution: Resolution, index: ModelIndex, axes: MeshAxes, findings: Findings
) -> Mapping[str, ExpertCut]:
    """The cut of every region of experts, by module; what cannot be computed becomes an error."""
    return {
        path: _Cutter(path, entry, expert_tensors(path, resolution, index, axes), index, axes, findings).cut()
        for path, entry in resolution.locals.items()
        if entry.kind == "experts"
    }


class _Cutter:
    def __init__(
        self,
        path: str,
        entry: LocalEntry,
        tensors: Sequence[ExpertTensor],
        index: ModelIndex,
        axes: MeshAxes,
        findings: Findings,
    ) -> None:
        self.path, self.entry, self.tensors, self.axes, self.findings = path, entry, tensors, axes, findings
        self.is_stacked = any(len(tensor.shape) > 2 for tensor in tensors)  # one tensor for all experts
        self.is_concatenated = getattr(index.modules[path], "is_concatenated", None)

    def cut(self) -> ExpertCut:
        experts, features, biases = [], [], dict[str, None]()
        for position, axis in enumerate(self.axes):
            dims = {tensor.name: tensor.dim(position) for tensor in self.tensors}
            cut = {dim for dim in dims.values() if dim is not None}
            if not cut:
                continue
            if cut == {0} and (self.is_stacked or self._is_one_each()):
                self._check_experts(axis, position, dims)
                experts.append(axis)
            elif self.is_stacked and 0 in cut:
                self._error(
                    f"shards {_by_dim(dims)} over {axis!r}: shard dim 0 of all of them to distribute the experts, or "
                    "later dims of all of them to shard their features"
                )
            elif not self.is_stacked and all(dims[t.name] in (0, None) for t in self.tensors if len(t.shape) > 1):
                self._error(
                    f"has a module for each expert, and shards their matrices on dim 0 alone over {axis!r}, which "
                    "neither distributes experts nor leaves a dim that ranks sum over. A placement cannot assign "
                    "whole modules to ranks: shard the features of each, gate and up on S(0) and down on S(1), or "
                    "hold the experts' weights in one parameter of shape (experts, ...), as transformers 5 does, and "
                    "write S(0) for it"
                )
            else:
                biases |= dict.fromkeys(self._whole_biases(axis, position, dims))
                self._check_packed(axis, position)
                features.append(axis)
        sizes = {tensor.shape[0] for tensor in self.tensors}
        return ExpertCut(tuple(experts), min(sizes) if experts else 0, tuple(features), tuple(biases))

    def _is_one_each(self) -> bool:
        """Whether the module itself has vectors of which each expert has one row."""
        sizes = {tensor.shape[0] for tensor in self.tensors}
        return len(sizes) == 1 and not any("." in tensor.name for tensor in self.tensors)

    def _check_experts(self, axis: str, position: int, dims: Mapping[str, int | None]) -> None:
        whole = [name for name, dim in dims.items() if dim is None]
        if whole:
            self._whole(axis, whole)
        sizes = {tensor.name: tensor.shape[0] for tensor in self.tensors}
        if not whole and len(set(sizes.values())) > 1:
            found = ", ".join(f"{name} {size}" for name, size in sizes.items())
            self._error(
                f"distributes different numbers of experts over {axis!r} ({found}); all of its parameters must have "
                "the same number"
            )
        for tensor in self.tensors:
            if tensor.dim(position) == 0 and type(tensor.running[position]) is not Shard:
                self._error(
                    f"spreads {tensor.name} over {axis!r} as {placement_text(tensor.running[position])}; write S(0), "
                    "so that each rank has consecutive experts"
                )

    def _whole_biases(self, axis: str, position: int, dims: Mapping[str, int | None]) -> Iterator[str]:
        """Parameters that are whole where weights are cut along the dim that is summed over, and are added to the sum."""
        refused = []
        for tensor in self.tensors:
            if dims[tensor.name] is not None:
                continue
            weight = next((t for t in self.tensors if _is_bias_of(tensor.name, t.name)), None)
            dim = weight.dim(position) if weight is not None else None
            added_to = [size for d, size in enumerate(weight.shape) if d != dim] if weight is not None else []
            if dim is not None and added_to[len(added_to) - len(tensor.shape) :] == list(tensor.shape):
                yield tensor.name
            else:
                refused.append(tensor.name)
        if refused:
            self._whole(axis, refused)

    def _check_packed(self, axis: str, position: int) -> None:
        """Gate and up one after the other in one dim: an ordinary cut gives a rank some of one and none of the other."""
        if self.is_concatenated is not True:
            return
        for tensor in self.tensors:
            dim = tensor.dim(position)
            if "gate_up" in tensor.name and dim is not None and type(tensor.running[position]) is Shard:
                self._error(
                    f"shards {tensor.name} as S({dim}) over {axis!r}, but it holds the gates first and then the ups, "
                    f"so that a rank would get only one kind; write Interleaved({dim}, 2), which shards each"
                )

    def _whole(self, axis: str, names: Sequence[str]) -> None:
        self._error(
            f"shards some parameters over {axis!r} and leaves {', '.join(names)} replicated, which every rank would "
            "add to the sum; shard all of them, or none (only a bias that is added after the sum may be replicated: "
            "X_bias of X, bias of weight)"
        )

    def _error(self, problem: str) -> None:
        self.findings.error("experts", f"the expert region {{names}} {problem}", self.entry.source, repr(self.path))


def _is_bias_of(name: str, weight: str) -> bool:
    owner, _, attribute = name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    if attribute == "bias":
        return weight == f"{prefix}weight"
    return attribute.endswith("_bias") and weight in (
        f"{prefix}{attribute.removesuffix('_bias')}",
        f"{name}"[:-5] + "_weight",
    )


def _by_dim(dims: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} on dim {dim}" for name, dim in dims.items() if dim is not None)


# Regions of experts in a forward on the meta device, without running data-dependent code.


@contextlib.contextmanager
def standing_in_for_experts(module: nn.Module) -> Iterator[None]:
    """Inside, :func:`stand_in_for_experts` holds."""
    own = vars(module).get("forward")
    stand_in_for_experts(module)
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def stand_in_for_experts(module: nn.Module) -> None:
    """From now on, a module of experts on the meta device returns a tensor of its result's shape, where it is called with
    tokens, ids and weights: how many tokens each expert gets is not known there."""
    original = module.forward
    signature = inspect.signature(original)

    def forward(*args: Any, **kwargs: Any) -> Any:
        tokens = _tokens(list(signature.bind(*args, **kwargs).arguments.values()))
        return original(*args, **kwargs) if tokens is None else tokens * 1

    module.forward = forward


def _tokens(arguments: Sequence[Any]) -> torch.Tensor | None:
    """The tokens among (tokens, ids, weights) in any order; None where the arguments are others."""
    found = [x for x in arguments if isinstance(x, torch.Tensor)]
    ids = [x for x in found if not x.is_floating_point()]
    others = [x for x in found if x.is_floating_point()]
    if len(ids) != 1 or len(others) != 2:
        return None
    return next((x for x in others if x.shape != ids[0].shape), others[0])


# Warnings about mixtures of experts: plans that run, and do not spread, send or compute what was probably meant.


def lint_experts(
    axes: MeshAxes, resolution: Resolution, cuts: Mapping[str, ExpertCut], index: ModelIndex, findings: Findings
) -> None:
    """Experts that are not spread, cut along dims that do not belong together, without a region; routers that are cut."""
    for path, cut in cuts.items():
        entry = resolution.locals[path]
        tensors = expert_tensors(path, resolution, index, axes)
        if entry.dispatch == "all_to_all" and not cut.experts:
            weights = f"{entry.path.text}.({'|'.join(tensor.name for tensor in tensors)})"
            axis = _free_axis(axes)
            findings.warning(
                "experts-whole",
                f"local '{entry.path}' sends tokens to experts on other ranks, but no axis distributes the experts of "
                f"{{names}}; add '{weights}': {{{axis}: S(0)}}, or remove dispatch",
                entry.source,
                path,
            )
        for axis in cut.features:
            _feature_dims(path, axis, tensors, axes, resolution, findings)
        _router(path, axes, resolution, index, findings)
    _missing_regions(axes, resolution, index, findings)


def _feature_dims(
    path: str, axis: str, tensors: list[ExpertTensor], axes: MeshAxes, resolution: Resolution, findings: Findings
) -> None:
    """The dims left whole are the tokens' features, of one size in all weights: the same that come in and go out."""
    position = axes.index(axis)
    whole = {t.name: t.shape[3 - dim] for t in tensors if len(t.shape) == 3 and (dim := t.dim(position)) in (1, 2)}
    if len(set(whole.values())) > 1:
        sizes = ", ".join(f"{name} {size}" for name, size in whole.items())
        findings.warning(
            "experts-dim",
            f"experts {{names}}: the cuts over '{axis}' leave dims of different sizes unsharded ({sizes}), but in "
            "every weight, that dim is the tokens' features; shard the other dim of one of them",
            resolution.locals[path].source,
            path,
        )


def _router(path: str, axes: MeshAxes, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    """A module beside the experts that has one row for each of them."""
    parent = path.rpartition(".")[0]
    numbers = {t.shape[0] for t in expert_tensors(path, resolution, index, axes) if len(t.shape) == 3}
    for child, module in index.modules[parent].named_children():
        name = f"{parent}.{child}" if parent else child
        if name == path or any(True for _ in module.children()):
            continue
        for tensor in expert_tensors(name, resolution, index, axes):
            for axis, placement in zip(axes, tensor.running):
                if len(numbers) == 1 and tensor.shape[0] in numbers and shard_dim(placement) == 0:
                    full = f"{name}.{tensor.name}"
                    planned = resolution.states[index.state_names[full]]
                    choice = planned.running_at(axis)
                    findings.warning(
                        "router",
                        f"{{names}}, the router of {path}, is sharded {placement_text(placement)} over '{axis}': a "
                        "rank would have the scores of some experts only, and selecting the best would gather them; "
                        f"replicate it ({{{axis}: R}})",
                        choice.entry.source if choice is not None else None,
                        shown_name(index.states[index.state_names[full]]),
                    )


def _missing_regions(axes: MeshAxes, resolution: Resolution, index: ModelIndex, findings: Findings) -> None:
    for path in modules_of_experts(index):
        if any(around in resolution.locals for around in enclosing(path)):
            continue
        tensors = expert_tensors(path, resolution, index, axes)
        cut = any(tensor.dim(axis) is not None for tensor in tensors for axis in range(len(axes.names)))
        dispatch = "all_to_all" if any(0 in map(tensor.dim, range(len(axes.names))) for tensor in tensors) else "mask"
        findings.warning(
            "missing-region",
            "{names} looks like experts, which run on the tokens that are routed to them: no DTensor rule "
            f"applies{', and sharded parameters would be gathered' if cut else ''}; add local: {{'{path}': {{kind: "
            f"experts, dispatch: {dispatch}}}}} (with a pattern for all layers)",
            None,
            path,
        )


def modules_of_experts(index: ModelIndex) -> Iterator[str]:
    """Modules called experts, with one tensor for all of them, that take tokens, ids and weights."""
    stacked = {
        index.owner(state.names[0])[0]
        for state in index.states.values()
        if state.is_parameter and len(state.shape or ()) == 3
    }
    for path, module in index.modules.items():
        named = "expert" in type(module).__name__.lower() or "expert" in path.rpartition(".")[2].lower()
        if path in stacked and named and index.is_called(path) and len(index.inputs(path).positional) >= 3:
            yield path


def _free_axis(axes: MeshAxes) -> str:
    """An axis to spread experts over: one called so, else the last that has several ranks."""
    if "ep" in axes:
        return "ep"
    several = [axis for axis in axes if axes.size(axis) > 1] or list(axes)
    return several[-1]
