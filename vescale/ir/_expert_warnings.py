"""Warnings about mixtures of experts: plans that run, and do not spread, send or compute what was probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vescale.ir._expert_sharding import ExpertCut, ExpertTensor, expert_tensors
from vescale.ir._findings import Findings
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._resolution import Resolution
from vescale.ir._resolve import shown_name
from vescale.placements import shard_dim
from vescale.plans import MeshAxes, placement_text

__all__ = ["lint_experts", "modules_of_experts"]


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
                f"local '{entry.path}' sends tokens to experts on other ranks, but no axis spreads the experts of "
                f"{{names}}; add '{weights}': {{{axis}: S(0)}}, or leave dispatch out",
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
            f"experts {{names}}: the cuts over '{axis}' leave dims of different sizes whole ({sizes}), but those are the "
            "tokens' features in every weight; cut the other dim of one of them",
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
                        f"{{names}}, the router of {path}, is cut {placement_text(placement)} over '{axis}': a rank would "
                        "see the scores of some experts only, and choosing the best gathers them; leave it whole "
                        f"({{{axis}: R}})",
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
            f"{{names}} looks like experts, which run on as many tokens as are routed to them: no DTensor rule fits"
            f"{', and cut parameters would be gathered' if cut else ''}; add local: {{'{path}': {{kind: experts, dispatch: "
            f"{dispatch}}}}} (with a pattern for all layers)",
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
