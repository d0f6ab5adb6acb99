"""``Plan.from_hf`` and ``Plan.from_model``: the parallel plan that a model carries, as an ordinary :class:`Plan`."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import regex
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale.errors import Coded, DerivedPlanError, PlanError, did_you_mean
from vescale.placements import InterleavedShard, RaggedShard, shard_dim
from vescale.plans._entries import INIT, RUN
from vescale.plans._plan_entries import PlanEntries

# Short path expressions that match exactly a list of concrete module names.

_NUMBER = regex.compile(r"(?<=^|\.)\d+(?=\.|$)")


def wildcard(name: str) -> str:
    """``layers.3.mlp`` to ``layers.*.mlp``: numbers between dots, as Hugging Face's plans write them."""
    return _NUMBER.sub("*", name)


def expressions(chosen: Iterable[str], every: Collection[str]) -> list[str]:
    """Path expressions that match all of ``chosen`` and nothing else of ``every``, in the order of ``chosen``.

    Layer numbers become ``\\d+``, or an alternative of numbers; siblings of the same layers become ``(a|b)``.
    """
    groups: dict[str, list[str]] = {}
    for name in chosen:
        groups.setdefault(wildcard(name), []).append(name)
    alike: dict[str, set[str]] = {}
    for name in every:
        alike.setdefault(wildcard(name), set()).add(name)
    children: dict[str, list[str]] = {}
    for generic, names in groups.items():
        for expression in _over_layers(generic, names, alike.get(generic, set()) - set(names)):
            parent, _, child = expression.rpartition(".")
            children.setdefault(parent, []).append(child)
    return [f"{parent}.{_either(names)}" if parent else _either(names) for parent, names in children.items()]


def merged_paths(
    tensors: Mapping[tuple[str, str], Placement], modules: Collection[str]
) -> Iterator[tuple[str, Placement]]:
    """(path expression, placement) for ``{(module, parameter or boundary): placement}``, merged where several agree, in the
    order of ``modules``."""
    order = {path: number for number, path in enumerate(modules)}
    own: dict[str, dict[Placement, list[str]]] = {}
    paths_of: dict[tuple[str, Placement], list[str]] = {}
    for (path, target), placement in tensors.items():
        if target.startswith("<"):
            paths_of.setdefault((target, placement), []).append(path)
        else:
            own.setdefault(path, {}).setdefault(placement, []).append(target)
    states: dict[tuple[str, Placement], list[str]] = {}
    for path, by_placement in own.items():
        for placement, targets in by_placement.items():
            target = targets[0] if len(targets) == 1 else f"({'|'.join(targets)})"
            states.setdefault((target, placement), []).append(path)
    lines = []
    for (target, placement), paths in (*states.items(), *paths_of.items()):
        for expression in expressions(paths, modules):
            first = min(order[path] for path in paths if regex.fullmatch(expression, path))
            lines.append((first, f"{expression}.{target}" if expression else target, placement))
    for _, pattern, placement in sorted(lines, key=lambda line: line[0]):
        yield pattern, placement


def _over_layers(generic: str, names: Sequence[str], others: Collection[str]) -> list[str]:
    """One expression that matches the given names, which differ in numbers only, and none of ``others``; the names
    themselves if no single number distinguishes them from the others."""
    if not others:
        return [generic.replace("*", r"\d+")]
    for position in range(generic.count("*")):
        numbers = list(dict.fromkeys(_NUMBER.findall(name)[position] for name in names))
        if not any(_NUMBER.findall(other)[position] in numbers for other in others):
            before, after = _around(generic, position)
            return [f"{before}{_either(numbers)}{after}".replace("*", r"\d+")]
    return list(names)


def _around(generic: str, position: int) -> tuple[str, str]:
    """The text before and after the star at ``position``."""
    parts = generic.split("*")
    return "*".join(parts[: position + 1]), "*".join(parts[position + 1 :])


def _either(names: Sequence[str]) -> str:
    """``(q|k|v)_proj`` for ``q_proj``, ``k_proj``, ``v_proj``; one name as it is."""
    if len(names) == 1:
        return names[0]
    reversed_parts = [tuple(reversed(name.split("_"))) for name in names]
    shared = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*reversed_parts)))
    shared = min(shared, min(map(len, reversed_parts)) - 1)
    heads = ["_".join(reversed(parts[shared:])) for parts in reversed_parts]
    return f"({'|'.join(heads)})" + "".join(f"_{part}" for part in reversed(reversed_parts[0][:shared]))


# Sequence parallelism, derived from a tensor-parallel plan: between the parts of a layer the sequence is sharded. If a
# part of a layer sums its output over ranks, it scatters the sum over the sequence, and it gathers its input; norms and
# additions between parts run on the shards. Parts are the modules that a layer calls: attention, feed-forward,
# mixtures. Parts that the plan does not name get the whole sequence, and their output is sharded again.

_SEQUENCE = Shard(1)  # of activations (batch, sequence, features)
_NORM = regex.compile(r".*norm.*|ln_.*|dropout.*|.*_dropout", regex.IGNORECASE)


def shard_sequence(
    modules: dict[str, nn.Module],
    inputs: dict[str, Placement],
    outputs: dict[str, Placement],
    experts: Collection[str],
    base: str,
) -> None:
    """Change boundaries of a plan, in place.

    Args:
        modules: of the model, by name.
        inputs, outputs: boundary placements that the plan has; they are changed.
        experts: modules that are expert regions.
        base: name of the model without its head, whose output is whole again.
    """
    layers = [path for path in modules if _is_layer(path, modules) and any(o.startswith(f"{path}.") for o in outputs)]
    for layer in layers:
        for part in _parts(layer, modules):
            summed = [o for o in outputs if (o == part or o.startswith(f"{part}.")) and inputs.get(o) == Shard(-1)]
            mixed = [e for e in experts if e == part or e.startswith(f"{part}.")]
            if len(summed) == 1 and not mixed:  # one sum ends the part
                outputs[summed[0]] = _SEQUENCE
            else:
                inputs[part] = Replicate()
                outputs[part] = _SEQUENCE
                for expert in mixed:  # the part's own boundaries sum, once, and scatter
                    if expert != part:
                        inputs.pop(expert, None)
                        outputs.pop(expert, None)
    for path, module in modules.items():
        if isinstance(module, nn.Embedding) and path in outputs and layers and not path.startswith(f"{layers[0]}."):
            outputs[path] = _SEQUENCE
    if layers:
        outputs[base] = Replicate()
        for head in [path for path in inputs if base and not path.startswith(f"{base}.")]:
            if inputs[head] == Replicate():
                del inputs[head]  # what the head adds to the gradient is scattered at the base's output


def _is_layer(path: str, modules: dict[str, nn.Module]) -> bool:
    """An item of a list whose forward runs and that holds several parts."""
    parent = path.rpartition(".")[0]
    return (
        path != ""
        and isinstance(modules[parent], nn.ModuleList)
        and not any(isinstance(modules[p], nn.ModuleList) for p in _hf_sequence_around(parent))
        and len(_parts(path, modules)) > 1
    )


def _hf_sequence_around(path: str) -> list[str]:
    found = []
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def _parts(layer: str, modules: dict[str, nn.Module]) -> list[str]:
    """Children of a layer that mix tokens or features: not its norms."""
    return [
        f"{layer}.{name}"
        for name, child in modules[layer].named_children()
        if not _NORM.fullmatch(name) and any(p.ndim > 1 for p in child.parameters())
    ]


# The tensor- and expert-parallel styles of Hugging Face transformers, as placements. Transformers' styles pass local
# tensors from module to module and correct gradients by hand. Ours are DTensors, so that placements suffice, and styles
# that only correct gradients have no entries.


@dataclass(frozen=True)
class Style:
    """A style, on one mesh axis.

    Attributes:
        cut: the dim of the module's own parameters that is sharded, counted from the back; None: they stay whole.
        front: count ``cut`` from the front instead (the dim of experts).
        vectors: whether parameters of one dim are sharded, too (biases along an output dim).
        pieces: the number of packed pieces in the dim (gate and up), each of which is sharded.
        inputs, outputs: the placements of the module's inputs and outputs; None: as they arrive.
        experts: the module runs as an expert region; its output is summed.
        whole_experts: if a module inside of an expert region has this style, the region's experts stay whole.
    """

    cut: int | None = None
    front: bool = False
    vectors: bool = False
    pieces: int = 1
    inputs: Placement | None = None
    outputs: Placement | None = None
    experts: bool = False
    whole_experts: bool = False

    def placement(self, num_dims: int) -> Placement | None:
        """The placement of a parameter with this number of dims; None: whole."""
        if self.cut is None or num_dims == 0:
            return None
        if self.front:
            return Shard(self.cut)
        if num_dims == 1:
            if not self.vectors:
                return None
            return Shard(0) if self.pieces == 1 else InterleavedShard(0, self.pieces)
        dim = num_dims + self.cut
        return Shard(dim) if self.pieces == 1 else InterleavedShard(dim, self.pieces)


_COLUMNS = Style(cut=-2, vectors=True, inputs=Replicate())
_GATHERED_COLUMNS = Style(cut=-2, vectors=True, inputs=Replicate(), outputs=Replicate())
_ROWS = Style(cut=-1, inputs=Shard(-1), outputs=Replicate())
_NOTHING = Style()

STYLES: dict[str, Style] = {
    "colwise": _COLUMNS,
    "colwise_gather_output": _GATHERED_COLUMNS,
    "colwise_rep": _GATHERED_COLUMNS,
    "rowwise": _ROWS,
    # These two get a whole input, which is sharded here.
    "rowwise_split_input": _ROWS,
    "rowwise_rep": _ROWS,
    "packed_colwise": Style(cut=-2, vectors=True, pieces=2, inputs=Replicate()),
    "packed_rowwise": Style(cut=-1, pieces=2),
    "embedding_rowwise": Style(cut=-2, outputs=Replicate()),
    "embedding_colwise": Style(cut=-1, outputs=Replicate()),
    "sequence_parallel": Style(inputs=Shard(1)),
    "all_reduce": Style(outputs=Replicate()),
    "moe_tp_experts": Style(inputs=Replicate(), outputs=Replicate(), experts=True),
    # It divides the contribution of a replicated expert to a sum over ranks.
    "moe_identity_expert": Style(whole_experts=True),
    "grouped_gemm": Style(cut=0, front=True, vectors=True),
    "ep_dispatch_experts": Style(inputs=Replicate(), outputs=Replicate(), experts=True),
    # DTensor itself knows that these gradients are Partial, and what is local.
    "replicate": _NOTHING,
    "replicated_with_grad_allreduce": _NOTHING,
    "mla_kv_a_proj": _NOTHING,
    "local_params": _NOTHING,
}


# Reading a model's configuration.


def config_value(config: Any, name: str, layer: int | None = None) -> Any:
    """An attribute of a configuration; None if it has none, or another one for each layer and ``layer`` is None.

    Configurations of transformers whose layers differ (Gemma 4) raise RuntimeError for such an attribute of the whole, and
    have one configuration for each layer.
    """
    try:
        return getattr(config, name, None)
    except RuntimeError:
        layers = getattr(config, "per_layer_config", None)
        return None if layer is None or layers is None else getattr(layers[layer], name, None)


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


class HfImportWarning(Coded, UserWarning, code="VS0130"):
    """``Plan.from_hf`` left something out that the model's plan names."""


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
        raise DerivedPlanError(
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
            raise DerivedPlanError(
                f"{type(model).__name__}.{name} uses the style {style!r}, which this version of vescale does not "
                f"support (styles: {', '.join(STYLES)}){did_you_mean(style, STYLES)}; remove it from the model's "
                f"{name}, or plan its modules by hand"
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
                self.notes.append(f"{wildcard(path)} is replicated: every rank adds its experts")
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
                    f"{wildcard(name)} holds gate and up: each is sharded, although the model's plan shards the pair"
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
                return f"{wildcard(name)} is replicated: {self.size} ranks do not divide its dim {dim} of {shape[dim]}"
            heads = self._num_heads(path)
            if heads is not None and shape[dim] % heads == 0 and heads % self.size:
                return f"{wildcard(name)} is replicated: {self.size} ranks do not divide its {heads} heads"
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
                    self.notes.append(
                        f"{wildcard(name)} has the placement of {wildcard(ruled[0])}, to which it is tied"
                    )
            for name in names:
                path = name.rpartition(".")[0]
                self.outputs.setdefault(path, Replicate())
                if not isinstance(self.modules[path], nn.Embedding):
                    self.inputs.setdefault(path, Replicate())

    def shard_sequence(self, base: str) -> None:
        """See :mod:`vescale.plans._hf_import`."""
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


# ``Plan.from_model``: the parallel plan that a model's own ``get_parallel_plan()`` returns, as an ordinary plan.
#
# VeOmni's models carry such plans: for each extra parallel axis (``ep`` for experts, ``emb`` for embeddings) patterns of
# parameter names, in which ``*`` stands for one part of a name, and a placement. They contain parameters only; regions of
# experts, the placements of summed embeddings, and those of the other parameters are added here. The object is read by its
# attributes (``extra_parallel_plan``, or ``ep_plan`` of earlier versions); a dict ``{axis: {pattern: placement}}`` is
# accepted, too.


_Patterns = Mapping[str, Any]


def add_parallel_plan(
    plan: PlanEntries,
    model: nn.Module,
    axes: Mapping[str, str],
    dispatch: str,
    batch_axes: Sequence[str] | None,
    shard_axis: str | None,
) -> None:
    """See :meth:`Plan.from_model`."""
    reader = _Reader(plan, model, dispatch)
    found = {axes.get(name, name): patterns for name, patterns in reader.patterns().items()}
    sharded = [shard_axis] if shard_axis is not None and shard_axis in plan.axes else []
    if batch_axes is None:
        batch_axes = [axis for axis in plan.axes if axis == "dp" or axis in sharded or axis in found]
    for axis in (*found, *batch_axes):
        if axis not in plan.axes:
            raise DerivedPlanError(
                f"Plan.from_model: the mesh has no axis {axis!r} (axes: "
                f"{', '.join(plan.axes.names)}){did_you_mean(axis, plan.axes.names)}; rename the axis of the mesh, or "
                f"pass axes={{{axis!r}: ...}}"
            )
    for axis, patterns in found.items():
        reader.read(axis, patterns, axis in batch_axes)
    if sharded:
        reader.rest([axis for axis in plan.axes if axis in sharded or (axis in found and axis in batch_axes)])
    for name in BATCHED_INPUTS:
        if batch_axes and name in inspect.signature(model.forward).parameters:
            plan.shard(f"<in:{name}>", dict.fromkeys(batch_axes, Shard(0)))


class _Reader:
    def __init__(self, plan: PlanEntries, model: nn.Module, dispatch: str) -> None:
        self.plan, self.model, self.dispatch = plan, model, dispatch
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.cut: dict[int, dict[str, None]] = {}  # by ``id`` of a parameter, the axes that cut it
        self.kind = type(model).__name__

    def patterns(self) -> dict[str, _Patterns]:
        """By name of the parallel axis, those without patterns left out."""
        get = getattr(self.model, "get_parallel_plan", None)
        if not callable(get):
            raise DerivedPlanError(
                f"{self.kind} has no get_parallel_plan(); Plan.from_hf reads the plans of transformers, and plan_zoo has "
                "plans for well-known models"
            )
        given = get()
        found = given if isinstance(given, Mapping) else getattr(given, "extra_parallel_plan", None)
        if not found and isinstance(getattr(given, "ep_plan", None), Mapping):
            found = {"ep": given.ep_plan}
        if not isinstance(found, Mapping) or not all(
            isinstance(patterns, Mapping | None) for patterns in found.values()
        ):
            raise DerivedPlanError(
                f"{self.kind}.get_parallel_plan() returns {type(given).__name__}, which is not a parallel plan; expected an "
                "extra_parallel_plan of {axis: {parameter pattern: placement}}, or an ep_plan of {pattern: placement}"
            )
        return {str(name): patterns for name, patterns in found.items() if patterns}

    def read(self, axis: str, patterns: _Patterns, cuts_batch: bool) -> None:
        experts: dict[str, None] = {}
        matched = False
        for pattern, placement in patterns.items():
            names = self._matching(pattern)
            matched |= bool(names)
            if not names or isinstance(placement, Replicate):
                continue
            if type(placement) is not Shard or placement.dim != 0:
                raise self._error(pattern, axis, f"has placement {placement!r}", "Shard(0) or Replicate()")
            for name in names:
                self._check(pattern, axis, name)
                self.cut.setdefault(id(self.parameters[name]), {})[axis] = None
                owner = name.rpartition(".")[0]
                if self.parameters[name].ndim > 2:
                    experts[owner] = None
            for expression in expressions(names, self.parameters):
                self.plan.shard(expression, Shard(0), mesh=axis)
            self._embeddings(names, axis, cuts_batch)
        if not matched:
            raise DerivedPlanError(
                f"{self.kind}.get_parallel_plan(): no parameter matches the patterns for {axis!r}: {', '.join(patterns)}"
                f"{did_you_mean(next(iter(patterns)), list(self.parameters))}"
            )
        for expression in expressions(experts, dict(self.model.named_modules())):
            self.plan.local(expression, kind="experts", dispatch=self.dispatch)

    def rest(self, axes: Sequence[str]) -> None:
        """At rest every parameter is sharded once over those of ``axes`` that do not shard it already."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for name, parameter in self.parameters.items():
            if id(parameter) in self.cut:
                alike.setdefault(tuple(self.cut[id(parameter)]), []).append(name)
        others = []
        for cut, names in alike.items():
            found = expressions(names, self.parameters)
            others += found
            for expression in found:
                self._rest(expression, [axis for axis in axes if axis not in cut])
        self._rest(f"(?!({'|'.join(others)})$).*", axes)

    def _rest(self, expression: str, axes: Sequence[str]) -> None:
        if axes:
            self.plan.shard(expression, RaggedShard(), mesh=axes, phase=INIT)
            self.plan.shard(expression, Replicate(), mesh=axes, phase=RUN)

    def _matching(self, pattern: Any) -> list[str]:
        expression = re.compile(r"[^.]+".join(map(re.escape, str(pattern).split("*"))))
        return [name for name in self.parameters if expression.fullmatch(name)]

    def _check(self, pattern: str, axis: str, name: str) -> None:
        """Raise unless sharding dim 0 has a known meaning for this parameter."""
        owner, parameter = self.model.get_submodule(name.rpartition(".")[0]), self.parameters[name]
        size = self.plan.axes.size(axis)
        if not (isinstance(owner, nn.Embedding) or parameter.ndim > 2 or self._belongs_to_stack(owner)):
            raise self._error(
                pattern,
                axis,
                f"shards {name} of shape {tuple(parameter.shape)}",
                "weights that hold all experts in dim 0, or those of an nn.Embedding (the weight of a single expert "
                "cannot be distributed: stack them); write other placements with Plan.shard",
            )
        if parameter.shape[0] % size:
            raise self._error(
                pattern,
                axis,
                f"shards {name}, {parameter.shape[0]} in dim 0, over {size} ranks",
                "a number of ranks that divides it",
            )

    def _belongs_to_stack(self, owner: nn.Module) -> bool:
        """Biases beside stacked weights."""
        return any(isinstance(p, torch.Tensor) and p.ndim > 2 for p in owner.parameters(recurse=False))

    def _embeddings(self, names: Sequence[str], axis: str, cuts_batch: bool) -> None:
        """Every rank looks up all indices in its rows, and the results are summed."""
        owners = [name.rpartition(".")[0] for name in names]
        chosen = [owner for owner in owners if isinstance(self.model.get_submodule(owner), nn.Embedding)]
        for expression in expressions(chosen, dict(self.model.named_modules())):
            self.plan.shard(f"{expression}.<in>", Replicate(), mesh=axis)
            self.plan.shard(f"{expression}.<out>", Shard(0) if cuts_batch else Replicate(), mesh=axis)

    def _error(self, pattern: str, axis: str, found: str, expected: str) -> PlanError:
        return DerivedPlanError(
            f"{self.kind}.get_parallel_plan(): {pattern!r} on {axis!r} {found}; Plan.from_model reads {expected}"
        )
