"""``FeatureGroup``: weights whose features meet in elementwise code, so that a cut of one of them is a cut of all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["FeatureGroup", "FeatureGroups", "Product"]


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
            self.keep_whole(weight, "the code takes the features apart in different ways")
        group.num_parts = num_parts
        return not group.whole
