"""How what a forward computes from its batch alone is computed from another batch of the same shapes: :class:`Recipes`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vescale.compat.tensor_subclasses import tree_flatten, tree_unflatten


@dataclass(eq=False)
class _Recipe:
    """Result ``number`` of an op, with recipes in place of tensors that have one; without an op, leaf ``number`` of the
    batch."""

    func: Any
    flat: Sequence[Any]
    tree: Any
    number: int

    def value(self, done: dict[_Recipe, Any]) -> Any:
        flat = [value_of(v, done) for v in self.flat]
        args, kwargs = tree_unflatten(flat, self.tree)
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        outs = [v for v in tree_flatten(self.func(*args, **kwargs))[0] if isinstance(v, torch.Tensor)]
        return outs[self.number]


@dataclass(eq=False)
class _Written:
    """The memory ``base``, behind an op that has written to it, or to a view of it."""

    base: Any
    write: _Recipe

    def value(self, done: dict[Any, Any]) -> Any:
        copy = value_of(self.base, done).clone()
        # Views in the op's operands are made of the copy; what else they are made of is what it was.
        self.write.value(
            {self.base: copy, **{k: v for k, v in done.items() if isinstance(k, _Recipe) and k.func is None}}
        )
        return copy


@dataclass(eq=False)
class _View:
    """A view of the memory ``base``, behind a write to that."""

    before: Any
    base: Any
    written: _Written

    def value(self, done: dict[Any, Any]) -> Any:
        leaves = {k: v for k, v in done.items() if isinstance(k, _Recipe) and k.func is None}
        return value_of(self.before, {**leaves, self.base: value_of(self.written, done)})


def value_of(x: Any, done: dict[Any, Any]) -> Any:
    if not isinstance(x, _Recipe | _Written | _View):
        return x
    if x not in done:
        done[x] = x.value(done)
    return done[x]


class Recipes:
    """Of the tensors of one trace that do not depend on parameters, by id; the trace keeps them.

    Args:
        batch: tensors and other leaves of the batch.
        leaves_of: those of another batch.
    """

    def __init__(self, batch: Sequence[Any], leaves_of: Callable[[Mapping[str, Any]], list[Any]]) -> None:
        self._leaves = [_Recipe(None, (), None, n) for n in range(len(batch))]
        self._of: dict[int, Any] = {}
        self._lost: set[int] = (
            set()
        )  # tensors that depend on the batch, or on parameters, in a way that is not followed
        self._memory: dict[int, list[torch.Tensor]] = {}  # by address: the first tensor there, and its views
        self._leaves_of = leaves_of
        for recipe, value in zip(self._leaves, batch):
            if isinstance(value, torch.Tensor):
                self._set(value, recipe)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._of

    def has_lost(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._lost

    def before(self, flat: Sequence[Any]) -> list[Any] | None:
        """An op's operands, before it runs; None: its results cannot be computed again."""
        if any(isinstance(v, torch.Tensor) and id(v) in self._lost for v in flat):
            return None
        return [self._of.get(id(v), v) if isinstance(v, torch.Tensor) else v for v in flat]

    def note(
        self,
        func: Any,
        before: list[Any] | None,
        tree: Any,
        outs: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """After an op. ``writes``: the tensors that it has written to."""
        for target in writes:
            self._note_write(func, before if len(writes) == 1 else None, tree, target)
        if writes:
            return
        for n, out in enumerate(outs):
            if before is None:
                self._lost.add(id(out))
            elif id(out) not in self._of:  # else it is what it was: a constant that is lifted
                self._set(out, _Recipe(func, before, tree, n))

    def lose(self, tensor: torch.Tensor) -> None:
        for one in self._sharing(tensor):
            self._of.pop(id(one), None)
            self._lost.add(id(one))

    def _set(self, tensor: torch.Tensor, recipe: Any) -> None:
        self._of[id(tensor)] = recipe
        if not tensor.is_meta:
            self._memory.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)

    def _sharing(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return self._memory.get(tensor.untyped_storage()._cdata, [tensor]) if not tensor.is_meta else [tensor]

    def _note_write(self, func: Any, before: list[Any] | None, tree: Any, target: torch.Tensor) -> None:
        shares = self._sharing(target)
        base = self._of.get(id(shares[0]))
        if before is None or base is None or id(target) not in self._of:
            self.lose(target)
            return
        written = _Written(base, _Recipe(func, before, tree, 0))
        views = {id(one): _View(self._of[id(one)], base, written) for one in shares[1:] if id(one) in self._of}
        self._of.update(views)
        self._of[id(shares[0])] = written

    def of(self, wanted: Sequence[Any]) -> Callable[[Mapping[str, Any]], list[Any]]:
        """What computes these from another batch of the same shapes; what is not made from the batch stays as it is."""
        recipes = [self._of.get(id(v), v) if isinstance(v, torch.Tensor) else v for v in wanted]
        leaves, leaves_of = self._leaves, self._leaves_of

        def compute(batch: Mapping[str, Any]) -> list[Any]:
            done: dict[Any, Any] = dict(zip(leaves, leaves_of(batch)))
            with torch.no_grad():
                return [value_of(recipe, done) for recipe in recipes]

        return compute
