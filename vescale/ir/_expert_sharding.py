"""The role of each mesh axis in a region of experts, by the placements of the parameters while the module runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex
from vescale.ir._resolution import Resolution
from vescale.placements import shard_dim
from vescale.plans import LocalEntry, MeshAxes, placement_text

__all__ = ["ExpertCut", "ExpertTensor", "expert_tensors", "find_expert_cuts"]


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
                    f"cuts {_by_dim(dims)} over {axis!r}: shard dim 0 of all alike to spread the experts, or later dims of "
                    "all to cut their features"
                )
            elif not self.is_stacked and all(dims[t.name] in (0, None) for t in self.tensors if len(t.shape) > 1):
                self._error(
                    f"has a module for each expert, and cuts their matrices on dim 0 alone over {axis!r}, which spreads "
                    "no experts and leaves no dim that ranks sum over. A placement cannot give whole modules to ranks: "
                    "cut the features of each, gate and up on S(0) and down on S(1), or hold the experts' weights in one "
                    "parameter of shape (experts, ...), as transformers 5 does, and write S(0) for it"
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
                f"spreads different numbers of experts over {axis!r} ({found}); its parameters must have as many"
            )
        for tensor in self.tensors:
            if tensor.dim(position) == 0 and type(tensor.running[position]) is not Shard:
                self._error(
                    f"spreads {tensor.name} over {axis!r} as {placement_text(tensor.running[position])}; write S(0), so "
                    "that each rank has experts in a row"
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
                    f"cuts {tensor.name} as S({dim}) over {axis!r}, but it holds gates first and then ups, of which a rank "
                    f"would get one kind only; write Interleaved({dim}, 2), which cuts each"
                )

    def _whole(self, axis: str, names: Sequence[str]) -> None:
        self._error(
            f"cuts some parameters over {axis!r} and leaves {', '.join(names)} whole, which every rank would add to the "
            "sum; cut all of them, or none (only a bias that is added behind the sum may stay whole: X_bias of X, bias "
            "beside weight)"
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
