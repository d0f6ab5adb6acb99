"""``FeatureFlow``: what torch functions make of the features of weights, with the dims that run over them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from vescale.ir._placement_flow import indexed_dims, tensors_of

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
            group.whole = other.whole = "weights are taken apart into different numbers of parts"
            return
        if first_is_part != second_is_part:
            smaller = other if first_is_part else group
            if smaller.num_parts > 1:
                group.whole = other.whole = "a part of some features meets all of others"
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
    name: str, dims: tuple[int, ...], x: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any], result: torch.Tensor
) -> tuple[int, ...]:
    """Where dims are after a function that changes their order; without those that are gone."""
    ndim = x.ndim
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = (int(value) % ndim for value in (*args[1:], *kwargs.values())[:2])
        swapped = {first: second, second: first}
        return tuple(swapped.get(d, d) for d in dims)
    if name in ("t", "T", "mT"):
        return tuple(2 * ndim - 3 - d if d >= ndim - 2 else d for d in dims) if ndim > 1 else dims
    if name == "permute":
        given = kwargs.get("dims", args[1] if len(args) == 2 else args[1:])
        order = [int(value) % ndim for value in given]
        return tuple(order.index(d) for d in dims)
    if name == "unsqueeze":
        at = int((*args[1:], *kwargs.values())[0]) % (ndim + 1)
        return tuple(d + (at <= d) for d in dims)
    if name == "movedim":
        marked = torch.empty(tuple(range(2, 2 + ndim)), device="meta").movedim(*args[1:], **kwargs)
        return tuple(list(marked.shape).index(d + 2) for d in dims)
    if name in ("view_as_complex", "view_as_real"):  # the last dim: a pair of numbers, or none
        return tuple(d for d in dims if d < ndim - (name == "view_as_complex"))
    if name == "squeeze":
        given = (*args[1:], *kwargs.values())
        chosen = (
            {int(d) % ndim for d in (given[0] if isinstance(given[0], tuple | list) else given[:1])} if given else None
        )
        gone = {d for d in range(ndim) if x.shape[d] == 1 and (chosen is None or d in chosen)}
        return tuple(d - sum(g < d for g in gone) for d in dims if d not in gone)
    return ()


@dataclass(frozen=True)
class Features:
    """Features in a tensor: of a weight, the dims that run over them, and whether they are one of the parts."""

    weight: str
    dims: tuple[int, ...]
    is_part: bool = False
    before: int = 1
    """Elements of dims that are merged with the outermost one, before it (batch and heads)."""


class FeatureFlow(ABC):
    """Follows features through everything but products."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.groups = FeatureGroups()
        self.keys_of_queries: dict[str, str] = {}
        self._weights = WeakIdKeyDictionary()  # parameter, or a view of one -> (first name, is transposed)
        self._features = WeakIdKeyDictionary()
        self._spread = WeakIdKeyDictionary()  # tensor -> dims along which expand() repeats one element

    @abstractmethod
    def _note_table(self, weight: str) -> None:
        """A table that the model's own code looks up."""

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
                self._keep_whole(first, f"{name} takes a replicated operand, too")
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
            dims = moved_dims(name, old, x, args, kwargs, result)
            if isinstance(found, Features):
                if not dims:
                    self._keep_whole(found, f"{name} takes some of them")
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
        if name == "iter":
            return self._keep_whole(features, "the code iterates over them")
        outermost = dim == features.dims[0]
        if outermost and features.before > 1:
            return self._keep_whole(features, "the code splits batch and heads together")
        if outermost:
            sizes = {part.shape[dim] for part in parts} if not removes else {1}
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
            self._note_table(known[0])  # a table of the model's own: its columns are features
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
                return self._keep_whole(features, "the code takes some of batch and heads")
            if before == features.dims[0] and length != size:
                start = item % size if isinstance(item, int) else item.indices(size)[0]
                equal = (
                    length
                    and size % length == 0
                    and start % length == 0
                    and (isinstance(item, int) or item.step in (None, 1))
                )
                alone = isinstance(item, int) and len(features.dims) == 1
                if not equal or alone or is_part or not self.groups.take_apart(features.weight, size // length):
                    self._keep_whole(features, "the code takes some of them")
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
            self._keep_whole(features, f"{name} goes along them")
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
                self._keep_whole(features, "attention has one head" if one else "attention is not cut by heads")
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
                self._keep_whole(found, "queries, keys and values are not made by the same heads")
                self._keep_whole(features, "queries, keys and values are not made by the same heads")
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
