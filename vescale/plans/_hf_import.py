"""``Plan.from_hf``: the parallel plan that a Hugging Face model carries, as an ordinary :class:`Plan`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import regex
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import Coded, HfPlanError, did_you_mean
from vescale.placements import InterleavedShard, shard_dim
from vescale.plans._hf_paths import expressions, merged_paths, wildcard
from vescale.plans._hf_sequence import shard_sequence
from vescale.plans._hf_styles import STYLES, Style
from vescale.plans._model_config import config_value
from vescale.plans._plan_entries import PlanEntries

__all__ = ["BATCHED_INPUTS", "HfImportWarning", "add_hf_entries"]

# Inputs of Hugging Face models whose first dim is the batch. Those that are indexed or broadcast (position_ids,
# attention_mask) are not among them: replicated, they need no communication.
BATCHED_INPUTS = [
    "input_ids",
    "inputs_embeds",
    "labels",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "token_type_ids",
    "input_features",
    "input_values",
    "decoder_labels",
]

_ATTENTION_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", *_ATTENTION_HEADS)
_KEY_VALUE = regex.compile(r"(k|v|kv|key|value)(_proj|_linear)?")


class HfImportWarning(Coded, UserWarning):
    """``Plan.from_hf`` left something out that the model's plan names."""

    code = "VS0124"


def add_hf_entries(
    plan: PlanEntries,
    model: nn.Module,
    axis: str,
    expert_axis: str | None,
    dispatch: str,
    batch_axis: str | None,
    sequence_parallel: bool,
) -> None:
    """See :meth:`Plan.from_hf`."""
    draft = _Draft(model, axis, plan.axes.size(axis))
    experts = _plan_of(model, "ep_plan") if expert_axis is not None else {}
    tensor = _plan_of(model, "tp_plan")
    if not tensor and not experts:
        raise HfPlanError(
            f"{type(model).__name__} carries no {'tp_plan' if expert_axis is None else 'tp_plan and no ep_plan'}; "
            "Plan.from_hf reads the plan of a transformers model: write the plan by hand, or see vescale.plan_zoo"
        )
    # Rules for tensor parallelism do not apply to an expert module with its own rule, nor to modules inside of it.
    tensor = {name: style for name, style in tensor.items() if not _covered(name, experts)}
    draft.read(tensor)
    if batch_axis is not None and batch_axis in plan.axes:
        names = inspect.signature(model.forward).parameters
        for name in BATCHED_INPUTS:
            if name in names:
                plan.shard(f"<in:{name}>", Shard(0), mesh=batch_axis)
    if expert_axis is not None:
        expert_draft = _Draft(model, expert_axis, plan.axes.size(expert_axis))
        expert_draft.read(experts)
        expert_draft.emit(plan, dispatch)
        draft.notes += expert_draft.notes
        draft.expert_parts = tuple(expert_draft.experts)
    else:
        draft.run_whole_experts(_plan_of(model, "ep_plan"))
    if sequence_parallel:
        base = getattr(model, "base_model_prefix", "")
        draft.shard_sequence(base if base in draft.modules else "")
    draft.emit(plan, None)
    if draft.notes:
        warnings.warn(
            f"Plan.from_hf({type(model).__name__}): " + "; ".join(dict.fromkeys(draft.notes)), HfImportWarning, 4
        )


def _plan_of(model: nn.Module, name: str) -> dict[str, str]:
    found = getattr(model, name, None)
    plan: dict[str, str] = dict(found) if isinstance(found, Mapping) else {}
    for style in plan.values():
        if style not in STYLES:
            raise HfPlanError(
                f"{type(model).__name__}.{name} uses the style {style!r}, which this version does not know (styles: "
                f"{', '.join(STYLES)}){did_you_mean(style, STYLES)}; remove it from the model's {name}, or plan its "
                "modules by hand"
            )
    return plan


def _is_packed(module: nn.Module, attribute: str, dim: int) -> bool:
    """Whether a parameter of stacked experts holds gate and up consecutively in ``dim``: twice the size that the down
    projection takes."""
    down = getattr(module, "down_proj", None)
    parameter = getattr(module, attribute)
    return (
        attribute == "gate_up_proj"
        and isinstance(down, nn.Parameter)
        and down.ndim == parameter.ndim == 3
        and dim == 1
        and parameter.shape[dim] == 2 * down.shape[2]
    )


def _covered(name: str, rules: Iterable[str]) -> bool:
    return any(name == rule or name.startswith(f"{rule}.") for rule in rules)


class _Draft:
    """The placements that a plan of styles gives one model on one axis, by concrete names.

    Attributes:
        states: parameters -> placements.
        inputs, outputs: modules -> placements at their boundary.
        experts: modules that are expert regions.
        notes: what was left out, and why.
    """

    def __init__(self, model: nn.Module, axis: str, size: int) -> None:
        self.axis, self.size, self.model = axis, size, model
        self.modules = dict(model.named_modules())
        self.states: dict[str, Placement] = {}
        self.inputs: dict[str, Placement] = {}
        self.outputs: dict[str, Placement] = {}
        self.experts: dict[str, None] = {}
        self.notes: list[str] = []
        self.expert_parts: tuple[str, ...] = ()  # regions that another axis spreads

    def read(self, plan: Mapping[str, str]) -> None:
        whole_experts = [path for path, style in self._styled(plan) if style.whole_experts]
        for path, module in self.modules.items():
            style = STYLES.get(plan.get(wildcard(path), ""))
            inside_whole = any(_covered(inner, [path]) for inner in whole_experts) and path != ""
            placed = {} if inside_whole else self._own_placements(path, module, style, plan)
            refused = self._refusal(path, placed)
            if refused:
                self.notes.append(refused)
                placed = {}
            self.states.update(placed)
            if style is None or (style.cut is not None and not placed):
                continue
            if style.experts:
                self.experts[path] = None
            if style.inputs is not None:
                self.inputs[path] = style.inputs
            if style.outputs is not None:
                self.outputs[path] = style.outputs
            if isinstance(module, nn.Embedding):  # a model's own class, which normalizes or projects the looked-up rows
                self.inputs.update((f"{path}.{name}", Replicate()) for name, _ in module.named_children())
            if inside_whole:
                self.notes.append(f"{wildcard(path)} stays whole: it has experts that every rank adds")
        self._follow_ties()

    def run_whole_experts(self, plan: Mapping[str, str]) -> None:
        """Make regions of experts that only the model's expert plan names; their parameters stay whole."""
        for path, style in self._styled(plan):
            if style.experts and path not in self.experts:
                self.experts[path] = None

    def _styled(self, plan: Mapping[str, str]) -> Iterator[tuple[str, Style]]:
        for path in self.modules:
            name = plan.get(wildcard(path))
            if name is not None:
                yield path, STYLES[name]

    def _own_placements(
        self, path: str, module: nn.Module, style: Style | None, plan: Mapping[str, str]
    ) -> dict[str, Placement]:
        """The placements of the module's own parameters: by a rule for the parameter, else for the module."""
        placed = {}
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            own = STYLES.get(plan.get(wildcard(name), ""), style)
            placement = own.placement(parameter.ndim) if own is not None else None
            if isinstance(placement, Shard) and _is_packed(module, attribute, placement.dim):
                self.notes.append(
                    f"{wildcard(name)} holds gate and up: each is cut, where the model's plan cuts the pair"
                )
                placement = InterleavedShard(placement.dim, 2)
            if placement is not None:
                placed[name] = placement
        return placed

    def _refusal(self, path: str, placed: Mapping[str, Placement]) -> str:
        """Why the parameters of a module cannot be sharded evenly; "" if they can."""
        for name, placement in placed.items():
            shape = self.model.get_parameter(name).shape
            dim = shard_dim(placement)
            assert dim is not None
            pieces = placement.num_chunks if isinstance(placement, InterleavedShard) else 1
            if shape[dim] % (self.size * pieces):
                return f"{wildcard(name)} stays whole: {self.size} ranks do not divide its dim {dim} of {shape[dim]}"
            heads = self._num_heads(path)
            if heads is not None and shape[dim] % heads == 0 and heads % self.size:
                return f"{wildcard(name)} stays whole: {self.size} ranks do not divide its {heads} heads"
        return ""

    def _num_heads(self, path: str) -> int | None:
        """How many heads a projection of an attention module has; None for other modules."""
        parent_path, _, name = path.rpartition(".")
        parent = self.modules[parent_path]
        if "attention" not in type(parent).__name__.lower():
            return None
        names = _KEY_VALUE_HEADS if _KEY_VALUE.fullmatch(name) else _ATTENTION_HEADS
        holders: tuple[Any, ...] = (parent, getattr(parent, "config", None))
        layer = getattr(parent, "layer_idx", None)
        found = (config_value(holder, number, layer) for number in names for holder in holders)
        return next((n for n in found if isinstance(n, int) and n > 0), None)

    def _follow_ties(self) -> None:
        """A tied parameter gets the placement of the first of its names with a rule; modules that read it get boundaries."""
        names_of: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names_of.setdefault(id(parameter), []).append(name)
        for names in names_of.values():
            ruled = [name for name in names if name in self.states]
            if len(names) == 1 or not ruled:
                continue
            placement = self.states[ruled[0]]
            for name in ruled[1:]:
                if self.states.pop(name) != placement:
                    self.notes.append(f"{wildcard(name)} follows {wildcard(ruled[0])}, to which it is tied")
            for name in names:
                path = name.rpartition(".")[0]
                self.outputs.setdefault(path, Replicate())
                if not isinstance(self.modules[path], nn.Embedding):
                    self.inputs.setdefault(path, Replicate())

    def shard_sequence(self, base: str) -> None:
        """See :mod:`vescale.plans._hf_sequence`."""
        shard_sequence(self.modules, self.inputs, self.outputs, [*self.experts, *self.expert_parts], base)

    # To entries

    def emit(self, plan: PlanEntries, dispatch: str | None) -> None:
        """Add the entries: regions first, then in the order of the model."""
        for path in expressions(self.experts, self.modules):
            plan.local(path, kind="experts", dispatch=dispatch)
        tensors = {name.rpartition(".")[::2]: placement for name, placement in self.states.items()}
        for target, boundaries in (("<in>", self.inputs), ("<out>", self.outputs)):
            tensors |= {(path, target): placement for path, placement in boundaries.items()}
        for pattern, placement in merged_paths(tensors, self.modules):
            plan.shard(pattern, placement, mesh=self.axis)
