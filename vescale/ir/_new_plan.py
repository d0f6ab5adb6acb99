"""``new_plan``: a first plan for a model without one, from a forward on the meta device."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from vescale.errors import DerivedPlanError
from vescale.ir._feature_trace import FeatureGroup, FeatureTrace, Product, trace_features
from vescale.ir._findings import Findings, merge_repeats
from vescale.ir._followed_forward import FlowMode, is_elementwise, keeps_tokens, tensors_of
from vescale.ir._lower import check
from vescale.ir._model_copy import copy_model, example_inputs
from vescale.ir._model_index import ModelIndex, enclosing
from vescale.ir._resolve import resolve
from vescale.placements import InterleavedShard
from vescale.plans import (
    BATCHED_INPUTS,
    MeshAxes,
    Plan,
    Source,
    expressions,
    merged_paths,
    plan_text,
    wildcard,
)

# ``choose_cuts``: which weights of a model to cut over the axis of tensor parallelism, from a trace of its features.


@dataclass
class Cut:
    """Tensors that are cut together.

    Attributes:
        title: the weights, layer numbers as ``*``.
        why: a comment for people.
        tensors: (module, parameter or boundary) -> placement.
        names: first names of the parameters.
        sums: modules whose results are sums over ranks.
        readers: modules that need their whole input.
        experts: modules of experts.
    """

    title: str
    why: str
    tensors: dict[tuple[str, str], Placement] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    sums: list[str] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)
    experts: list[str] = field(default_factory=list)

    def concerns(self, names: Collection[str]) -> bool:
        """Whether a finding with these names (of parameters or modules) is about one of the tensors."""
        paths = {path for path, _ in self.tensors}
        return any(name in self.names or name in paths or name.rpartition(".")[0] in paths for name in names)


def choose_cuts(trace: FeatureTrace) -> tuple[list[Cut], dict[str, str]]:
    """(what to cut, in the order of the model; weights that stay whole -> why). Each weight is cut once: where a product
    could end one pair and begin another, the pair with fewer sums wins, then the larger one."""
    chooser = _Chooser(trace)
    chooser.vocabulary()
    chooser.pairs()
    chooser.experts()
    order = {path: number for number, path in enumerate(trace.index.modules)}
    chooser.cuts.sort(key=lambda cut: min(order[path] for path, _ in cut.tensors))
    return chooser.cuts, chooser.whole()


class _Chooser:
    def __init__(self, trace: FeatureTrace) -> None:
        self.trace, self.index, self.size = trace, trace.index, trace.num_ranks
        self.cuts: list[Cut] = []
        self.taken: set[str] = set()

    # Vocabularies

    def vocabulary(self) -> None:
        """Tables by their rows, and the heads that score them."""
        config = getattr(self.index.model, "config", None)
        sizes = {getattr(c, "vocab_size", None) for c in (config, getattr(config, "text_config", None))} - {None}
        by_weight: dict[str, list[Product]] = {}
        for product in self.trace.products.values():
            by_weight.setdefault(product.weight, []).append(product)
        tables = {w: p for w, p in by_weight.items() if self._is_table(w, p, sizes)}
        rows = {self._shape(weight)[0] for weight in tables}
        for weight, products in by_weight.items():
            heads = [p for p in products if p.in_dim >= 0]
            is_head = bool(heads) and self._is_head(heads, rows | sizes)
            if (weight in tables and (not heads or is_head)) or (weight not in tables and is_head):
                self._cut_vocabulary(weight, products)

    def _is_table(self, weight: str, products: list[Product], sizes: set[object]) -> bool:
        lookups = [p for p in products if p.in_dim < 0]
        if not lookups or lookups[0].looks_up_positions or not all(p.is_layer for p in products):
            return False
        module = self.index.modules[lookups[0].path]
        rows, columns = self._shape(weight)
        if not isinstance(module, nn.Embedding) or module.max_norm is not None:
            return False
        return rows in sizes if sizes else rows > columns

    def _is_head(self, heads: list[Product], sizes: Collection[object]) -> bool:
        shape = self._shape(heads[0].weight)
        own = self.trace.groups.of(heads[0].weight)
        outside = bool(own.whole) or not own.consumers
        pairs = [group for group in self.trace.groups if not group.whole]
        fits = heads[0].inputs == {None} or not any(head in group.consumers for group in pairs for head in heads)
        return outside and fits and all(h.is_layer and shape[h.out_dim] in sizes for h in heads)

    def _cut_vocabulary(self, weight: str, products: list[Product]) -> None:
        tied = len({p.in_dim < 0 for p in products}) > 1
        cut = Cut(
            weight,
            "The vocabulary: each rank holds a part of its rows" + (", also for the tied head." if tied else "."),
        )
        for product in products:
            by_tokens = product.in_dim >= 0 and product.num_dims == {3} and not product.splits_tokens
            for path in product.layers:
                self._place(cut, weight, Shard(0 if product.in_dim < 0 else product.out_dim), path)
                cut.tensors[path, "<out>"] = Shard(1) if by_tokens else Replicate()
                if product.in_dim >= 0:
                    cut.tensors[path, "<in>"] = Replicate()
                    if product.bias:
                        self._place(cut, product.bias, Shard(0), path)
            if product.in_dim < 0:
                continue
            cut.why += (
                " One all-to-all gives each rank all logits of its part of the tokens."
                if by_tokens
                else " Logits are gathered."
            )
        self._take(cut)

    # Pairs

    def pairs(self) -> None:
        candidates = [g for g in self.trace.groups if not self._refusal(g)]
        candidates.sort(key=lambda g: (len(g.consumers) > len(g.producers), -self._elements(self._weights(g))))
        for number, group in enumerate(candidates):
            own, others = self._weights(group), set[str]()
            for other in map(self._weights, candidates[number + 1 :]):  # those in its way, and not in each other's
                if other & own and not other & (others | self.taken):
                    others |= other
            if own & self.taken or self._elements(others) > self._elements(own):
                group.whole = "another pair shards one of its weights"
                continue
            self._cut_pair(group)

    def _refusal(self, group: FeatureGroup) -> str:
        """Why a group is no pair; "" if it is."""
        if group.whole:
            return group.whole
        if not group.consumers:
            return "nothing sums over its features"
        products = [p for p in group.producers if p.in_dim >= 0]
        if not products:
            return "its features come from an embedding"
        if not all(p.is_layer for p in (*products, *group.consumers)):
            return "it is not a layer of its own"
        if any(
            None in p.inputs or len({self.trace.groups.root(w) for w in p.inputs if w}) > 1 for p in group.consumers
        ):
            return "the layer that sums over its features also runs on others"
        own = {p.weight for p in group.producers}
        if any(p.weight in own for p in group.consumers):
            return "a layer reads the features that it computes"
        return ""

    def _weights(self, group: FeatureGroup) -> set[str]:
        return {*group.members, *(p.weight for p in group.consumers)}

    def _elements(self, weights: set[str]) -> int:
        return sum(math.prod(self._shape(weight)) for weight in weights)

    def _cut_pair(self, group: FeatureGroup) -> None:
        names = [wildcard(path) for p in (*group.producers, *group.consumers) for path in p.layers]
        cut = Cut(", ".join(dict.fromkeys(names)), _why(group))
        owners = {name: p.layers[0] for p in group.producers if p.layers for name in (p.weight, p.bias)}
        for name, (dim, holds_all) in group.members.items():
            packed = group.num_parts > 1 and holds_all
            placement = InterleavedShard(dim, group.num_parts) if packed else Shard(dim)
            self._place(cut, name, placement, owners.get(name))
        for product in group.producers:
            if product.in_dim >= 0:
                self._reads(cut, product.layers)
        for keys, queries in self.trace.keys_of_queries.items():
            if self.trace.groups.of(queries) is group:  # each rank uses some of the heads: the gradient is a sum
                for product in self.trace.groups.of(keys).producers:
                    self._reads(cut, product.layers)
        for product in group.consumers:
            self._place(cut, product.weight, Shard(product.in_dim), product.layers[0])
            for path in product.layers:
                module = self.index.modules[path]
                cut.tensors[path, "<out:0>" if isinstance(module, nn.MultiheadAttention) else "<out>"] = Replicate()
                cut.sums.append(path)
        self._take(cut)

    def _reads(self, cut: Cut, paths: list[str]) -> None:
        for path in paths:
            cut.tensors[path, "<in>"] = Replicate()
            cut.readers.append(path)

    # Experts

    def experts(self) -> None:
        for path, module in self.trace.experts.items():
            stacked = [(n, p) for n, p in module.named_parameters() if p.ndim >= 2]
            numbers = {p.shape[0] for n, p in stacked if p.ndim == 3}
            spread = len(numbers) == 1 and all(
                p.shape[0] in numbers and p.shape[0] % self.size == 0 for _, p in module.named_parameters()
            )
            why = (
                f"Experts: each rank holds {next(iter(numbers)) // self.size} of {next(iter(numbers))}."
                if spread
                else (f"Experts are replicated: {self.size} ranks do not divide them.")
            )
            cut = Cut(wildcard(path), why, experts=[path])
            for name, _ in module.named_parameters():
                if spread:
                    cut.tensors[path, name] = Shard(0)
                    cut.names.add(self.index.state_names[f"{path}.{name}"])
            if spread:
                cut.tensors[path, "<in>"] = cut.tensors[path, "<out>"] = Replicate()
            self._take(cut) if spread else self.cuts.append(cut)

    # Whole ones

    def whole(self) -> dict[str, str]:
        """Weights of products that stay whole, and why."""
        found = {}
        for product in self.trace.products.values():
            if product.weight in self.taken or math.prod(self._shape(product.weight)) < _SMALL:
                continue
            if product.weight in self.trace.groups:
                group = self.trace.groups.of(product.weight)
                found[product.weight] = self._refusal(group) or "another pair shards one of its weights"
        return found

    # Helpers

    def _shape(self, name: str) -> torch.Size:
        shape = self.index.states[name].shape
        assert shape is not None
        return torch.Size(shape)

    def _place(self, cut: Cut, name: str, placement: Placement, path: str | None) -> None:
        """By the name of the parameter in the module that runs it, where it has one there."""
        names = self.index.states[name].names
        own = next((n for n in names if path is not None and n.startswith(f"{path}.")), names[0])
        module, _, attribute = own.rpartition(".")
        if self.index.module_names[module] != module:
            module = self.index.module_names[module]
        cut.tensors[module, attribute] = placement
        cut.names.add(name)

    def _take(self, cut: Cut) -> None:
        self.cuts.append(cut)
        self.taken |= cut.names


_SMALL = 1024  # elements: smaller weights are not worth a comment


def _why(group: FeatureGroup) -> str:
    packed = f", each of {group.num_parts} fused parts" if group.num_parts > 1 else ""
    if group.uses_attention:
        return f"Attention: sharded by heads{packed}; the output projection sums over them."
    if len([p for p in group.producers if p.in_dim >= 0]) > 1:
        return f"A gated MLP: output features are sharded{packed}, and the next layer sums over them."
    return f"A pair of layers: output features of the first are sharded{packed}, and the second sums over them."


# ``shard_tokens``: cuts the sequence between the parts of each layer, where nothing in the layer mixes tokens outside of
# modules that get all of them.
#
# The layers of a list are followed from their first input to their first output: elementwise code, norms of a token's
# features and linear layers keep tokens apart. Where the code does anything else, the list keeps whole sequences.


def shard_tokens(model: nn.Module, inputs: Mapping[str, Any], cuts: list[Cut], trace: FeatureTrace) -> list[str]:
    """Change sums of the cuts to parts of the sequence, and add a cut for each list of layers; returns notes on others."""
    layers = _layers(trace, cuts)
    walk = _TokenTrace(trace, cuts, layers)
    with walk.watched(), FlowMode(walk), contextlib.suppress(Exception):
        model(**inputs)
    notes = []
    for name in dict.fromkeys(layers.values()):
        own = [path for path, of in layers.items() if of == name]
        problem = walk.problems.get(name) or next((f"{p} does not run" for p in own if p not in walk.finished), None)
        if problem:
            notes.append(f"The sequence is not sharded in {name}: {problem}.")
            continue
        cut = Cut(f"{name}: tokens", "The sequence, between the parts of layers: each rank has a part of the tokens.")
        for path in own:
            first = next(iter(inspect.signature(trace.index.modules[path].forward).parameters))
            cut.tensors[path, f"<in:{first}>"] = Shard(1)
        cut.tensors[own[-1], "<out:0>"] = Replicate()
        for other in cuts:
            for path in other.sums:
                if _layer_of(path, own):
                    for key in [key for key in other.tensors if key[0] == path and key[1].startswith("<out")]:
                        other.tensors[key] = Shard(1)
            for path in other.experts:
                if _layer_of(path, own) and (path, "<out>") in other.tensors:
                    other.tensors[path, "<out>"] = Shard(1) if walk.sharded_experts else Replicate()
        for path in walk.whole_readers:
            if _layer_of(path, own):
                cut.tensors[path, "<in>"] = Replicate()
        cuts.append(cut)
    return notes


def _layers(trace: FeatureTrace, cuts: list[Cut]) -> dict[str, str]:
    """Items of lists that hold sums -> the list."""
    index = trace.index
    found = {}
    for cut in cuts:
        for path in cut.sums:
            parts = path.split(".")
            for length in range(1, len(parts) + 1):
                parent = ".".join(parts[: length - 1])
                if isinstance(index.modules[parent], nn.ModuleList):
                    found[".".join(parts[:length])] = parent
                    break
    lists = set(found.values())
    order = [path for path in index.modules if path.rpartition(".")[0] in lists]
    return {path: path.rpartition(".")[0] for path in order}


def _layer_of(path: str, layers: list[str]) -> bool:
    return any(path.startswith(f"{layer}.") for layer in layers)


class _TokenTrace:
    def __init__(self, trace: FeatureTrace, cuts: list[Cut], layers: dict[str, str]) -> None:
        self.index, self.layers = trace.index, layers
        self.readers = {path for cut in cuts for path in (*cut.readers, *cut.experts)}
        self.sums = {path for cut in cuts for path in cut.sums}
        self.problems: dict[str, str] = {}
        self.finished: set[str] = set()
        self.whole_readers: set[str] = set()
        self.sharded_experts = False
        self._tokens = WeakIdKeyDictionary()
        self._running: list[str] = []

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in self.index.modules.items():
                if path in self.layers:
                    stack.enter_context(module.register_forward_pre_hook(self._enters(path), with_kwargs=True))
                    stack.enter_context(module.register_forward_hook(self._leaves(path)))
                if path in self.readers:
                    stack.enter_context(module.register_forward_pre_hook(self._reads, with_kwargs=True))
                if path in self.sums:
                    stack.enter_context(module.register_forward_hook(self._sums))
            yield

    def _enters(self, path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._running.append(path)
            x = args[0] if args else next(iter(kwargs.values()), None)
            first = next(iter(inspect.signature(module.forward).parameters))
            x = kwargs.get(first, x) if not args else x
            if not isinstance(x, torch.Tensor) or x.ndim != 3:
                self._fail(f"the first input of {path} is not of shape (batch, tokens, features)")
            else:
                self._tokens[x] = True

        return hook

    def _leaves(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = next(tensors_of(output), None)
            if first is None or first not in self._tokens:
                self._fail(f"the first output of {path} does not depend on its own tokens alone")
            self.finished.add(path)
            self._running.pop()
            if not self._running:
                self._tokens.clear()

        return hook

    def _reads(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module gets all tokens."""

        def whole(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                copy = value.view_as(value)
                self._tokens.pop(copy, None)
                return copy
            return value

        return tuple(map(whole, args)), {key: whole(value) for key, value in kwargs.items()}

    def _sums(self, module: nn.Module, args: Any, output: Any) -> None:
        first = next(tensors_of(output), None)
        if first is None or first.ndim != 3:
            self._fail("a sum has no dim of tokens")
        elif self._running:
            self._tokens[first] = True

    def _fail(self, why: str) -> None:
        if self._running:
            self.problems.setdefault(self.layers[self._running[-1]], why)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        operands = list(tensors_of((args, kwargs)))
        outputs = list(tensors_of(result))
        if not any(t in self._tokens for t in operands) or not outputs or not self._running:
            return
        for t in operands if is_elementwise(name) else ():
            at = 1 - outputs[0].ndim + t.ndim
            if t not in self._tokens and at >= 0 and t.shape[at] != 1 and t.requires_grad:
                self._mixed(f"{name.strip('_')} with a tensor of all tokens")
        if keeps_tokens(name, operands, [t in self._tokens for t in operands], outputs[0], args, kwargs):
            self._tokens[outputs[0]] = True
        else:
            self._mixed(name.strip("_"))

    def _mixed(self, name: str) -> None:
        self._fail(f"{name} may mix tokens in {self._running[-1]}")


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
        units = _units(index) if zero < 3 else ()
        plan.zero(zero, axis=data, units=units, source=_SOURCE)  # type: ignore[arg-type]  # checked in new_plan
        plan.comments[".*"] = _ZERO[zero]
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
