"""``choose_cuts``: which weights of a model to cut over the axis of tensor parallelism, from a trace of its features."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._feature_trace import FeatureGroup, FeatureTrace, Product
from vescale.ir._followed_forward import FlowMode, is_elementwise, keeps_tokens, tensors_of
from vescale.placements import InterleavedShard
from vescale.plans import wildcard


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
        fits = heads[0].inputs == {None} or not any(self._ends_pair(head) for head in heads)
        return outside and fits and all(h.is_layer and shape[h.out_dim] in sizes for h in heads)

    def _ends_pair(self, product: Product) -> bool:
        return any(product in g.consumers and not g.whole for g in self.trace.groups)

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
