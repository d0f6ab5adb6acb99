"""Which weights feed which, seen from a forward on the meta device: the products whose features stay together through
elementwise code, gates, splits and attention heads, up to the product that sums over them.

Names do not matter. Features are followed with the dims that run over them, outermost first (heads, then the features of
a head). A cut of them is a cut of the outermost dim, so that it never goes through a head. Whatever uses features otherwise
keeps their weights whole, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._expert_sharding import modules_of_experts, standing_in_for_experts
from vescale.ir._followed_forward import FlowMode, indexed_dims, is_elementwise, source_dims, tensors_of
from vescale.ir._model_index import ModelIndex

# ``FeatureGroup``: weights whose features meet in elementwise code, so that a cut of one of them is a cut of all.


@dataclass
class Product:
    """A weight that a forward multiplies with (a linear layer, a table that it looks up).

    Attributes:
        path: the module that runs the product.
        weight: first name of the parameter.
        bias: first name of the bias; "" without one.
        out_dim, in_dim: dims of the weight that run over the features made, and over those summed; ``in_dim`` is -1 for a
            lookup.
        boundaries: the modules whose inputs are the product's input and whose outputs are its result: several where
            modules share the weight; None where there is none, so that no entry can place them.
        inputs: weights of the groups that its calls get features of; None where they come from elsewhere.
        num_dims: of the results of its calls.
        looks_up_positions: whether a lookup is the same for all of the batch.
        splits_tokens: whether the code takes tokens (dim 1) of the result apart before the loss.
    """

    path: str
    weight: str
    bias: str
    out_dim: int
    in_dim: int
    boundaries: list[str | None]
    inputs: set[str | None] = field(default_factory=set)
    num_dims: set[int] = field(default_factory=set)
    looks_up_positions: bool = False
    splits_tokens: bool = False

    @property
    def is_layer(self) -> bool:
        """Whether every call is all that its module does."""
        return None not in self.boundaries

    @property
    def layers(self) -> list[str]:
        return [path for path in self.boundaries if path is not None]


@dataclass
class FeatureGroup:
    """Features that are cut alike, or not at all.

    Attributes:
        members: first name of each parameter -> (its dim over the features, whether it holds all parts).
        num_parts: what the code takes the features apart into (fused query, key and value: 3); 1: they stay together.
        whole: why they cannot be cut; "" if they can.
        uses_attention: they are heads of an attention.
    """

    members: dict[str, tuple[int, bool]]
    producers: list[Product]
    consumers: list[Product] = field(default_factory=list)
    num_parts: int = 1
    whole: str = ""
    uses_attention: bool = False


class FeatureGroups:
    """A partition of weights into groups, which only grow together."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._groups: dict[str, FeatureGroup] = {}

    def __iter__(self) -> Iterator[FeatureGroup]:
        return iter(self._groups.values())

    def __contains__(self, weight: str) -> bool:
        return weight in self._parents

    def add(self, product: Product) -> None:
        """A group of one product, or the product's group if it has one."""
        if product.weight not in self._parents:
            self._parents[product.weight] = product.weight
            members = {product.weight: (product.out_dim, True)}
            if product.bias:
                members[product.bias] = (0, True)
            self._groups[product.weight] = FeatureGroup(members, [product])

    def root(self, weight: str) -> str:
        while self._parents[weight] != weight:
            weight = self._parents[weight]
        return weight

    def of(self, weight: str) -> FeatureGroup:
        return self._groups[self.root(weight)]

    def keep_whole(self, weight: str, why: str) -> None:
        group = self.of(weight)
        group.whole = group.whole or why

    def join(self, first: str, second: str, first_is_part: bool = False, second_is_part: bool = False) -> None:
        """Features of both meet; those of one may be a part of what was made, where the other's are all."""
        a, b = self.root(first), self.root(second)
        if a == b:
            return
        group, other = self._groups[a], self._groups[b]
        if group.whole or other.whole:
            why = group.whole or other.whole
            group.whole = other.whole = why
            return
        if group.num_parts > 1 and other.num_parts > 1 and group.num_parts != other.num_parts:
            group.whole = other.whole = "weights are split into different numbers of parts"
            return
        if first_is_part != second_is_part:
            smaller = other if first_is_part else group
            if smaller.num_parts > 1:
                group.whole = other.whole = "a shard of some features is combined with all of others"
                return
            smaller.members = {name: (dim, False) for name, (dim, _) in smaller.members.items()}
        group.num_parts = max(group.num_parts, other.num_parts)
        group.members |= other.members
        group.producers += other.producers
        group.consumers += other.consumers
        group.uses_attention |= other.uses_attention
        self._parents[b] = a
        del self._groups[b]

    def take_apart(self, weight: str, num_parts: int) -> bool:
        """Note that the code splits the features; false, and whole from now on, if it did so otherwise before."""
        group = self.of(weight)
        if group.num_parts not in (1, num_parts):
            self.keep_whole(weight, "the code splits the features in different ways")
        group.num_parts = num_parts
        return not group.whole


# Where dims of a tensor are after a view, or after a function that changes the order of dims.


def _dim_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dims of both shapes with equal numbers of elements; dims of size 1 are left out."""
    old = [d for d, size in enumerate(before) if size != 1]
    new = [d for d, size in enumerate(after) if size != 1]
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) and j < len(new):
        left, right = [old[i]], [new[j]]
        i, j = i + 1, j + 1
        while (a := math.prod(before[d] for d in left)) != (b := math.prod(after[d] for d in right)):
            if a < b and i < len(old):
                left.append(old[i])
                i += 1
            elif a > b and j < len(new):
                right.append(new[j])
                j += 1
            else:
                return found
        found.append((left, right))
    return found


def viewed_dims(
    dims: tuple[int, ...], merged: int, before: Sequence[int], after: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """(The dims that run over features after a view, outermost first; elements of other dims that are merged with the
    outermost one, before it). ``merged``: how many were before the view. None where a cut of them is no cut of a dim."""
    outermost: list[int] = []
    others: list[int] = []
    for left, right in _dim_groups(before, after):
        own = [d for d in dims if d in left]
        if dims[0] in own:
            merged *= math.prod(before[d] for d in left[: left.index(dims[0])])
            outermost = list(right)
            while len(outermost) > 1 and merged > 1 and merged % after[outermost[0]] == 0:
                merged //= after[outermost.pop(0)]
        elif own and (set(own) == set(left) or left[0] in own):
            others += right if set(own) == set(left) else right[:1]
    return ((*outermost, *others), merged) if outermost else None


def merged_dims(dims: tuple[int, ...], before: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
    """The dims of the result that consist of some of ``dims`` alone."""
    return tuple(d for left, right in _dim_groups(before, after) if set(left) <= set(dims) for d in right)


def moved_dims(
    name: str, dims: tuple[int, ...], x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Where dims are after a function that changes their order; without those that are gone."""
    if name in ("view_as_complex", "view_as_real"):  # the last dim: a pair of numbers, or none
        return tuple(d for d in dims if d < x.ndim - (name == "view_as_complex"))
    places = source_dims(name, x, args[1:], kwargs)
    return tuple(places[d] for d in dims if d in places)


@dataclass(frozen=True)
class Features:
    """Features in a tensor: of a weight, the dims that run over them, and whether they are one of the parts."""

    weight: str
    dims: tuple[int, ...]
    is_part: bool = False
    before: int = 1
    """Elements of dims that are merged with the outermost one, before it (batch and heads)."""


class FeatureTrace:
    """What a forward did.

    Attributes:
        groups: weights whose features meet.
        products: by the first name of the weight, in the order of their first calls.
        experts: modules of experts, which are not run.
        keys_of_queries: weights of keys and values that stay whole because there are fewer heads than ranks need -> weight
            of their queries.
        stopped: why the forward ended early; "" if it did not.
    """

    def __init__(self, index: ModelIndex, num_ranks: int) -> None:
        self.index, self.num_ranks = index, num_ranks
        self.groups = FeatureGroups()
        self.keys_of_queries: dict[str, str] = {}
        self._weights = WeakIdKeyDictionary()  # parameter, or a view of one -> (first name, is transposed)
        self._features = WeakIdKeyDictionary()
        self._spread = WeakIdKeyDictionary()  # tensor -> dims along which expand() repeats one element
        self.products: dict[str, Product] = {}
        self.stopped, self.batch = "", 1
        self.experts: dict[str, nn.Module] = {}
        self._tokens = WeakIdKeyDictionary()  # results of products that may be heads -> the product
        self._running: list[str] = []
        for name, state in index.states.items():
            if state.is_parameter:
                path, attribute = index.owner(name)
                self._weights[getattr(index.modules[path], attribute)] = (name, False)

    def run(self, inputs: Mapping[str, Any]) -> None:
        self.batch = next((x.shape[0] for x in tensors_of(inputs) if x.ndim), 1)
        with self.watched(), FlowMode(self):
            try:
                self.index.model(**inputs)
            except Exception as error:  # data-dependent code has no values on the meta device
                self.stopped = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for path, module in self.index.modules.items():
                stack.enter_context(module.register_forward_pre_hook(lambda *_, path=path: self._running.append(path)))
                stack.enter_context(module.register_forward_hook(lambda *_: self._running.pop() and None))
            for path in modules_of_experts(self.index):
                self.experts[path] = module = self.index.modules[path]
                stack.enter_context(standing_in_for_experts(module))
            yield

    # Every torch function

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        plain = name.strip("_")
        self._follow_tokens(plain, args, kwargs, result)
        if self._alias(plain, args, result):
            return
        if plain in _PRODUCTS and self._product(plain, args, kwargs, result):
            return
        handler = _HANDLERS.get(plain)
        if handler is None:
            handler = FeatureTrace._elementwise if is_elementwise(name) else FeatureTrace._unknown
        handler(self, plain, args, kwargs, result)

    def _alias(self, name: str, args: tuple[Any, ...], result: Any) -> bool:
        """A parameter that is transposed or converted is still that parameter."""
        known = self._weights.get(args[0]) if args and isinstance(args[0], torch.Tensor) else None
        if known is None or not isinstance(result, torch.Tensor):
            return False
        if name in ("t", "T", "mT") or (name in ("transpose", "swapaxes", "permute") and args[0].ndim == 2):
            self._weights[result] = (known[0], not known[1])
        elif name in ("to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "type"):
            self._weights[result] = known
        else:
            return False
        return True

    # Features, through everything but products

    def _note_parts(self, features: Features, num_parts: int) -> None:
        """The code takes features apart; 0: into parts of different sizes."""

    def _keep_whole(self, features: Features, why: str) -> None:
        self.groups.keep_whole(features.weight, why)

    def _use(self, features: Features, tensor: torch.Tensor) -> None:
        """The cut must fit here: parts have been taken apart, and ranks divide the outermost dim."""
        group, size = self.groups.of(features.weight), tensor.shape[features.dims[0]] // features.before
        if (
            group.num_parts > 1
            and not features.is_part
            and group.members[self.groups.of(features.weight).producers[0].weight][1]
        ):
            size //= group.num_parts
        if size % self.num_ranks:
            what = "heads" if len(features.dims) > 1 else "features"
            self._keep_whole(features, f"{self.num_ranks} ranks do not divide {size} {what}")

    def _of(self, tensor: Any) -> Features | None:
        """The features in a tensor that may still be cut."""
        found = self._features.get(tensor) if isinstance(tensor, torch.Tensor) else None
        return found if found is not None and not self.groups.of(found.weight).whole else None

    def _given(self, args: Any, kwargs: Any = None) -> list[tuple[torch.Tensor, Features]]:
        tensors = tensors_of((args, kwargs or {}))
        return [(t, found) for t in tensors if (found := self._of(t)) is not None]

    def _unknown(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for _, features in self._given(args, kwargs):
            if any(True for _ in tensors_of(result)):
                self._keep_whole(features, f"{name} mixes them")

    def _largest(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Of two tensors, or along a dim."""
        two = (len(args) > 1 and isinstance(args[1], torch.Tensor)) or "other" in kwargs
        (self._elementwise if two else self._along)(name, args, kwargs, result)

    def _elementwise(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        for output in tensors_of(result):
            self._meet(name, list(tensors_of((args, kwargs))), output)

    def _meet(self, name: str, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Elements at one place meet: features of all operands are cut alike, or none."""
        tagged = [(t, found) for t in tensors if (found := self._of(t)) is not None]
        if not tagged:
            return
        moved = [(t, tuple(dim + result.ndim - t.ndim for dim in f.dims), f) for t, f in tagged]
        _, dims, first = moved[0]
        is_part = any(features.is_part for _, _, features in moved)
        for tensor, own, features in moved:
            self._use(features, tensor)
            if (
                own[0] != dims[0]
                or features.before != first.before
                or tensor.shape[features.dims[0]] != result.shape[dims[0]]
            ):
                for _, _, each in moved:
                    self._keep_whole(each, f"{name} combines features along different dims")
                return
            self.groups.join(first.weight, features.weight, first.is_part, features.is_part)
        for tensor in tensors:
            if self._of(tensor) is None and not self._fits(tensor, dims, result, first, is_part):
                self._keep_whole(first, f"{name} also takes a replicated operand")
        self._features[result] = replace(first, dims=dims, is_part=is_part)

    def _fits(
        self, tensor: torch.Tensor, dims: tuple[int, ...], result: torch.Tensor, features: Features, is_part: bool
    ) -> bool:
        """Whether an operand without features may meet them: every rank has, or can make, its part without communication."""
        dim = dims[0] - result.ndim + tensor.ndim
        if dim < 0 or tensor.shape[dim] == 1 or dim in self._spread.get(tensor, ()) or not tensor.requires_grad:
            return True
        known = self._weights.get(tensor)
        if known is None or (len(dims) > 1 and tensor.shape[dim] != result.shape[dims[0]]):
            return False
        self.groups.of(features.weight).members.setdefault(known[0], (dim, not is_part))
        return True

    def _view(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        x = args[0]
        features = self._of(x)
        if features is not None:
            viewed = viewed_dims(features.dims, features.before, x.shape, result.shape)
            if viewed is None:
                self._keep_whole(features, f"{name} mixes them with other dims")
            else:
                self._features[result] = replace(features, dims=viewed[0], before=viewed[1])
        spread = self._spread.get(x)
        if spread:
            self._spread[result] = merged_dims(spread, x.shape, result.shape)

    def _move(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        x = args[0]
        for found in (self._of(x), self._spread.get(x)):
            if found is None:
                continue
            old = found.dims if isinstance(found, Features) else found
            dims = moved_dims(name, old, x, args, kwargs)
            if isinstance(found, Features):
                if not dims:
                    self._keep_whole(found, f"{name} selects some of them")
                else:
                    if name == "view_as_real" and dims[-1] == x.ndim - 1:
                        dims = (*dims, x.ndim)
                    self._features[result] = replace(found, dims=dims)
            else:
                self._spread[result] = dims

    def _expand(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        x, shift = args[0], result.ndim - args[0].ndim
        grown = [d for d in range(result.ndim) if d < shift or x.shape[d - shift] != result.shape[d]]
        self._spread[result] = tuple(grown)
        features = self._of(x)
        if features is not None:
            self._features[result] = replace(features, dims=tuple(dim + shift for dim in features.dims))

    def _split(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        x = args[0]
        features = self._of(x)
        if features is None:
            return
        given = args[1:] if name in ("unbind", "iter") else args[2:]
        dim = kwargs.get("dim", given[0] if given else 0) % x.ndim
        parts = list(tensors_of(result))
        removes = name in ("unbind", "iter")
        outermost = dim == features.dims[0]
        sizes = {part.shape[dim] for part in parts} if not removes else {1}
        if outermost and features.before == 1 and not (removes and len(features.dims) == 1):
            self._note_parts(features, 0 if len(sizes) > 1 else x.shape[dim] if removes else len(parts))
        if name == "iter":
            return self._keep_whole(features, "the code iterates over them")
        if outermost and features.before > 1:
            return self._keep_whole(features, "the code splits batch and heads together")
        if outermost:
            if len(sizes) > 1 or (removes and len(features.dims) == 1):
                self._keep_whole(features, "the code splits them into unequal parts")
                return
            if len(parts) > 1 and (features.is_part or not self.groups.take_apart(features.weight, len(parts))):
                self._keep_whole(features, "the code splits them more than once")
                return
        for part in parts:
            dims = features.dims
            if removes:
                dims = tuple(d - (d > dim) for d in dims if d != dim)
            if dims:
                self._features[part] = replace(
                    features, dims=dims, is_part=features.is_part or (outermost and len(parts) > 1)
                )

    def _item(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        x = args[0]
        features = self._of(x) if isinstance(x, torch.Tensor) else None
        if not isinstance(result, torch.Tensor):
            return
        known = self._weights.get(x) if isinstance(x, torch.Tensor) and x.ndim == 2 else None
        if known is not None and isinstance(args[1], torch.Tensor) and not args[1].is_floating_point():
            self._noted(known[0], None, 1, -1)  # a table of the model's own: its columns are features
            self._features[result] = Features(known[0], (result.ndim - 1,))
            return
        if isinstance(x, torch.Tensor) and (spread := self._spread.get(x)):
            found = {
                before: after for before, item, after in indexed_dims(args[1], x.ndim) if not isinstance(item, int)
            }
            self._spread[result] = tuple(found[d] for d in spread if d in found)
        if features is None:
            self._unknown(name, args, kwargs, result)
            return
        taken = list(indexed_dims(args[1], x.ndim))
        if not taken:
            self._keep_whole(features, "they are selected by index")
            return
        dims, is_part = [], features.is_part
        for before, item, after in taken:
            if before not in features.dims:
                continue
            size = x.shape[before]
            length = 1 if isinstance(item, int) else len(range(*item.indices(size)))
            if before == features.dims[0] and features.before > 1 and length != size:
                return self._keep_whole(features, "the code selects some of batch and heads")
            if before == features.dims[0] and length != size:
                start = item % size if isinstance(item, int) else item.indices(size)[0]
                equal = (
                    length
                    and size % length == 0
                    and start % length == 0
                    and (isinstance(item, int) or item.step in (None, 1))
                )
                alone = isinstance(item, int) and len(features.dims) == 1
                if length and not alone and (isinstance(item, int) or item.step in (None, 1)):
                    self._note_parts(features, 0 if size % length else size // length)
                if not equal or alone or is_part or not self.groups.take_apart(features.weight, size // length):
                    self._keep_whole(features, "the code selects some of them")
                    return
                is_part = True
            if not isinstance(item, int):
                dims.append((features.dims.index(before), after))
        kept = tuple(after for _, after in sorted(dims))
        self._features[result] = Features(features.weight, kept, is_part, features.before)

    def _along(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Reductions, softmax and normalization keep features on dims that they do not go along."""
        x = args[0]
        features = self._of(x) if isinstance(x, torch.Tensor) else None
        outputs = list(tensors_of(result))
        if features is None or not outputs:
            return
        if "norm" in name:
            shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else x.shape)
            along = (
                set(range(x.ndim - len(shape), x.ndim))
                if isinstance(shape, tuple | list | torch.Size)
                else set(range(x.ndim))
            )
        else:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
            dims = (dims,) if isinstance(dims, int) else dims
            along = {d % x.ndim for d in dims} if isinstance(dims, tuple | list) else set(range(x.ndim))
        if features.dims[0] in along:
            self._keep_whole(features, f"{name} runs along them")
            return
        self._use(features, x)
        for output in outputs:
            gone = along if output.ndim < x.ndim else set()
            self._features[output] = replace(
                features, dims=tuple(d - sum(g < d for g in gone) for d in features.dims if d not in gone)
            )

    def _matmul(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Of two activations: heads are a batch dim of both."""
        operands = list(tensors_of((args, kwargs)))
        a, b = operands[-2:] if len(operands) >= 2 else (None, None)
        if a is None or b is None or min(a.ndim, b.ndim) < 2:
            return self._unknown(name, args, kwargs, result)
        for tensor, features in self._given((a, b)):
            if features.dims[0] >= tensor.ndim - 2:
                self._unknown(name, args, kwargs, result)
                return None
        self._meet(name, [t for t in operands if t.ndim > 2], result)
        found = self._of(result)
        if found is not None:
            self.groups.of(found.weight).uses_attention = True
            inner = (result.ndim - 1,) if b in self._features else ()
            self._features[result] = replace(found, dims=(found.dims[0], *inner))
        return None

    def _attention(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        """Heads of the query; keys and values are cut alike, or stay whole where ranks do not divide their heads."""
        names = ("query", "key", "value")
        query, *others = (args[i] if i < len(args) else kwargs[n] for i, n in enumerate(names))
        mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
        found = self._of(query)
        if found is None or found.dims[0] != query.ndim - 3:
            for _, features in self._given((query, *others)):
                one = query.ndim > 3 and query.shape[-3] == 1
                self._keep_whole(features, "attention has one head" if one else "attention is not sharded by heads")
            return None
        self._use(found, query)
        self.groups.of(found.weight).uses_attention = True
        for other in others:
            given = self._of(other)
            if given is None:
                continue
            features = given
            is_same = self.groups.root(features.weight) == self.groups.root(found.weight)
            heads = other.shape[other.ndim - 3] if features.dims[0] == other.ndim - 3 else 1
            if features.dims[0] not in (other.ndim - 3, other.ndim - 1) or (is_same and heads % self.num_ranks):
                self._keep_whole(found, "queries, keys and values do not come from the same heads")
                self._keep_whole(features, "queries, keys and values do not come from the same heads")
            elif heads % self.num_ranks:
                self._keep_whole(features, f"{self.num_ranks} ranks do not divide {heads} heads of keys and values")
                self.keys_of_queries[features.weight] = found.weight
            else:
                self._use(features, other)
                self.groups.join(found.weight, features.weight, found.is_part, features.is_part)
        if isinstance(mask, torch.Tensor):
            self._meet(name, [query, mask] if mask.ndim == query.ndim else [query], query)
        self._features[result] = replace(found, dims=(query.ndim - 3, query.ndim - 1))
        return None

    def _concatenate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        given = self._given(args, kwargs)
        dim = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        if not given:
            return
        dim %= result.ndim
        if name == "stack":  # a dim more
            copies = []
            for tensor in tensors_of((args, kwargs)):
                copies.append(tensor.unsqueeze(dim))
                self._move("unsqueeze", (tensor, dim), {}, copies[-1])
            return self._meet(name, copies, result)
        if any(f.dims[0] == dim for _, f in given):
            return self._unknown(name, args, kwargs, result)
        self._meet(name, [t for t in tensors_of(args) if t.ndim == result.ndim], result)
        return None

    def _select(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        dim, place = int(args[1]) % args[0].ndim, int(args[2])
        index = (*[slice(None)] * dim, place)
        self._item(name, (args[0], index), {}, result)

    # Products

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> bool:
        """A product with a parameter; false if it is one of two activations."""
        x, weight, bias = _operands(name, args, kwargs)
        known = self._weights.get(weight) if isinstance(weight, torch.Tensor) else None
        if known is None or weight.ndim != 2 or not isinstance(x, torch.Tensor):
            return False
        given = self._of(x)
        rows_first = (name == "linear") != known[1]
        out_dim, in_dim = (0, 1) if rows_first else (1, 0)
        if name == "embedding":
            out_dim, in_dim = 1, -1
        if given is not None and in_dim >= 0 and given.dims[-1] != x.ndim - 1 and result.ndim == x.ndim:
            self._features[result] = given  # a product inside of each head: its weight serves all heads
            self._note(known[0], None, given)
            self.products.pop(known[0], None)
            return True
        product = self._noted(known[0], bias, out_dim, in_dim)
        product.num_dims.add(result.ndim)
        product.looks_up_positions |= in_dim < 0 and (x.ndim < 2 or x.shape[0] < self.batch)
        fits = given is not None and given.dims == (x.ndim - 1,) and in_dim >= 0
        if given is not None and not fits:
            self._keep_whole(
                given, f"'{product.path or 'the model'}' multiplies only some of the features of each head"
            )
        if given is not None and fits:
            self._use(given, x)
            group = self.groups.of(given.weight)
            if product not in group.consumers:
                group.consumers.append(product)
        product.inputs.add(given.weight if given is not None and fits else None)
        self._features[result] = Features(known[0], (result.ndim - 1,))
        if result.ndim == 3 and in_dim >= 0:
            self._tokens[result] = product
        return True

    def _noted(self, weight: str, bias: Any, out_dim: int, in_dim: int) -> Product:
        path = self._running[-1] if self._running else ""
        if weight in self.products:
            product = self.products[weight]
            if (product.in_dim < 0) == (in_dim < 0):
                if (boundary := self._boundary(path, weight)) not in product.boundaries:
                    product.boundaries.append(boundary)
                return product
            key = f"{weight}@{path}"  # a table that is a head, too
            found = self.products.get(key)
            if found is None:
                found = self.products[key] = self._new(path, weight, bias, out_dim, in_dim)
            self.groups.keep_whole(weight, "a table that the head shares")
            return found
        product = self.products[weight] = self._new(path, weight, bias, out_dim, in_dim)
        self.groups.add(product)
        return product

    def _new(self, path: str, weight: str, bias: Any, out_dim: int, in_dim: int) -> Product:
        known = self._weights.get(bias) if isinstance(bias, torch.Tensor) else None
        return Product(
            path, weight, known[0] if known is not None else "", out_dim, in_dim, [self._boundary(path, weight)]
        )

    def _boundary(self, path: str, weight: str) -> str | None:
        """The running module, if it does nothing but the product."""
        module = self.index.modules[path]
        own = {self.index.state_names[f"{path}.{n}" if path else n] for n, p in module.named_parameters() if p.ndim > 1}
        is_only = own == {weight} and not any(True for _ in module.children())
        return path if path and is_only else None

    def multi_head(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """``nn.MultiheadAttention`` runs as one function: packed rows of query, key and value, and the output's columns."""
        self._unknown(name, args, kwargs, result)
        path = self._running[-1] if self._running else ""
        module = self.index.modules[path]
        if not isinstance(module, nn.MultiheadAttention) or module.in_proj_weight is None:
            return
        names = {n: self.index.state_names[f"{path}.{n}"] for n, _ in module.named_parameters()}
        if names["in_proj_weight"] in self.products:
            return
        packed = Product(path, names["in_proj_weight"], names.get("in_proj_bias", ""), 0, 1, [path])
        output = Product(path, names["out_proj.weight"], names.get("out_proj.bias", ""), 0, 1, [path], {packed.weight})
        for product in (packed, output):
            self.products[product.weight] = product
            self.groups.add(product)
        group = self.groups.of(packed.weight)
        group.num_parts, group.uses_attention, group.consumers = 3, True, [output]
        if module.num_heads % self.num_ranks:
            group.whole = f"{self.num_ranks} ranks do not divide {module.num_heads} heads"
        if module.bias_k is not None or module.add_zero_attn:
            group.whole = "keys and values get an extra row"

    def _note(self, weight: str, why: str | None, given: Features) -> None:
        if weight in self.groups:
            self.groups.keep_whole(weight, why or "it is shared by all heads")

    # Tokens of heads

    def _follow_tokens(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Whether the tokens of a head's result stay together up to a loss."""
        tensors = [t for t in tensors_of((args, kwargs)) if t in self._tokens]
        for tensor in tensors:
            product = self._tokens[tensor]
            if name in ("cross_entropy", "shape", "size", "dim", "get"):
                continue
            for output in tensors_of(result):
                if (is_elementwise(name) and output.shape == tensor.shape) or (
                    name in ("view", "reshape", "flatten") and output.shape[-1] == tensor.shape[-1]
                ):
                    self._tokens[output] = product
                else:
                    product.splits_tokens = True


def trace_features(model: nn.Module, inputs: Mapping[str, Any], num_ranks: int) -> FeatureTrace:
    """Follow ``model(**inputs)`` on the meta device; ``num_ranks`` decides what can be cut. The model is left as it was."""
    trace = FeatureTrace(ModelIndex(model), num_ranks)
    trace.run(inputs)
    return trace


def _operands(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """(input, weight, bias) of a product."""
    if name in ("addmm", "baddbmm"):
        return args[1], args[2], args[0]
    if name == "rmatmul":
        return args[1], args[0], None
    names = ("input", "weight", "bias")
    given = [args[i] if i < len(args) else kwargs.get(n) for i, n in enumerate(names)]
    return given[0], given[1], given[2] if name == "linear" else None


_PAIRS = ("view_as_complex", "view_as_real")
_PRODUCTS = {"linear", "addmm", "matmul", "mm", "embedding"}
_Handler = Callable[[FeatureTrace, str, tuple[Any, ...], dict[str, Any], Any], None]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(("view", "reshape", "reshape_as", "flatten", "unflatten"), FeatureTrace._view),
    **dict.fromkeys(
        ("transpose", "swapaxes", "swapdims", "permute", "unsqueeze", "squeeze", "movedim", "t", "T", "mT", *_PAIRS),
        FeatureTrace._move,
    ),
    **dict.fromkeys(("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "iter"), FeatureTrace._split),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), FeatureTrace._expand),
    **dict.fromkeys(
        ("mean", "sum", "softmax", "var", "layer_norm", "rms_norm", "normalize", "cumsum", "amax", "log_softmax"),
        FeatureTrace._along,
    ),
    **dict.fromkeys(("matmul", "bmm", "baddbmm", "rmatmul"), FeatureTrace._matmul),
    **dict.fromkeys(("cat", "concat", "stack"), FeatureTrace._concatenate),
    **dict.fromkeys(("max", "min"), FeatureTrace._largest),
    "getitem": FeatureTrace._item,
    "select": FeatureTrace._select,
    F.scaled_dot_product_attention.__name__: FeatureTrace._attention,
    "multi_head_attention_forward": FeatureTrace.multi_head,
}
