"""``RowFlow``: which values of a forward depend on several rows of its batch, seen in a trace of the batch and one of a
micro-batch.

What depends on the batch alone can be taken from the whole batch, which every rank has: a micro-batch gets its rows of it.
What depends on parameters cannot, as other micro-batches are not there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from vescale.compat.tensor_subclasses import tree_leaves
from vescale.pipeline._row_rules import FACTORIES, KEEPS_ORDER, LINEAR, rule_of
from vescale.pipeline._row_states import FIXED, UNKNOWN, Operand, RowCall, RowState

__all__ = ["EDITS", "RowFlow", "RowOps", "Substitute"]

EDITS = (
    "Compute what needs all rows before .step() and pass the result in the batch (advantages, weights that are normalized, "
    "pairs of rows as two tensors); or give microbatches=1 with GPipe; or rows='microbatch' in plan.pipeline(...), if each "
    "micro-batch shall compute it of its own rows, as gradient accumulation does"
)
_NOT_USERS = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
_APART = 12  # ops that are in one of two traces
_CHOOSES = {"nonzero", "masked_select", "unique_consecutive", "_unique2"}  # of how many rows, values tell
_VIEWS = {"select", "slice", "expand", "permute", "transpose", "t", "split", "split_with_sizes", "unbind", "diagonal"}


def _users_line() -> str:
    """The nearest line that is neither torch's nor this library's."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back  # type: ignore[assignment]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "?"


@dataclass(frozen=True)
class _Op:
    func: Any
    args: Any
    kwargs: Any
    outs: Sequence[torch.Tensor]
    depends: bool  # on parameters
    where: str

    @property
    def name(self) -> str:
        return self.func._schema.name.split("::")[-1]  # type: ignore[no-any-return]


@dataclass
class RowOps:
    """The ops of a trace in order. ``batch``: leaves of the batch. ``origins``: of functions' results, outside of gated
    modules, by id."""

    batch: Sequence[torch.Tensor]
    ops: list[_Op] = field(default_factory=list)
    origins: dict[int, Any] = field(default_factory=dict)

    def note(
        self, func: Any, args: Any, kwargs: Any, outs: list[torch.Tensor], depends: bool, inside: str | None
    ) -> None:
        if outs:
            where = f"{_users_line()}{f', in {inside!r}' if inside else ''}"
            self.ops.append(_Op(func, args, kwargs, tuple(outs), depends, where))


@dataclass(frozen=True)
class Substitute:
    """A value that a micro-batch takes from the whole batch: the origin of the micro-batch's; what computes the batch's;
    and the dim of which a micro-batch has a part (None: it has all)."""

    origin: Any
    value: Callable[[Mapping[str, Any]], torch.Tensor]
    dim: int | None


class RowFlow:
    """
    Args:
        means: of both traces, the means over labels by id: the mean, the logits and the labels.
    """

    def __init__(
        self,
        whole: RowOps,
        part: RowOps,
        count: int,
        replay: Callable[[torch.Tensor], Callable[[Mapping[str, Any]], torch.Tensor] | None],
        means: tuple[Mapping[int, Sequence[torch.Tensor]], Mapping[int, Sequence[torch.Tensor]]],
    ) -> None:
        self._means, self._means_of_part = means
        self._origins, self._count, self._replay = part.origins, count, replay
        self.substitutes: dict[int, Substitute] = {}
        self._states: dict[int, RowState] = {}
        self._small: dict[int, set[int]] = {}  # of a tensor that is two entries of the batch, several
        self._made: set[int] = {id(out) for op in (*whole.ops, *part.ops) for out in op.outs}
        self._roots: dict[int, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        for ops in (whole.ops, part.ops):
            for op in ops:
                if op.name in KEEPS_ORDER:
                    self._roots[id(op.outs[0])] = self._root(op.args[0] if op.args else op.kwargs["self"])
        for big, small in zip(whole.batch, part.batch):
            self._set(big, small, RowState("rows") if big.shape != small.shape else FIXED)
        for one, other in _aligned(
            *([op for op in ops if op.name not in KEEPS_ORDER] for ops in (whole.ops, part.ops))
        ):
            self._follow(one, other)

    def of(self, big: torch.Tensor, small: torch.Tensor) -> RowState:
        return self._operand(big, small).state

    def _root(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._roots.get(id(tensor), tensor)

    def _set(self, big: torch.Tensor, small: torch.Tensor, state: RowState) -> None:
        root = id(self._root(big))
        self._states[root] = state
        self._small.setdefault(root, set()).add(id(self._root(small)))

    def _operand(self, big: torch.Tensor, small: torch.Tensor, *, counts: bool = False) -> Operand:
        root = self._root(big)
        state = self._states.get(id(root))
        if state is None:
            is_given = id(root) not in self._made and big.shape == small.shape  # a parameter, or a constant
            return Operand(big, small, FIXED if is_given else UNKNOWN)
        if id(self._root(small)) not in self._small[id(root)]:
            return Operand(big, small, UNKNOWN.needing(state.needs))
        found = Operand.of(big, small, state, self._count)
        can_be_taken = found.kind in ("mixed", "unknown") and not found.state.is_pythons
        if can_be_taken or (found.kind == "count" and not counts):
            for one, other in ((big, small), (root, self._root(small))):
                taken = self._substituted(one, other)
                if taken is not None:
                    self._states[id(self._root(one))] = taken
                    return Operand.of(big, small, taken, self._count)
            if found.kind == "count":
                return replace(found, state=RowState("mixed", why="counts the rows"))
        return found

    def _substituted(self, big: torch.Tensor, small: torch.Tensor) -> RowState | None:
        """The state of a tensor that is taken from the whole batch; None: it cannot be."""
        origin, value = self._origins.get(id(small)), self._replay(big)
        different = [d for d, (a, b) in enumerate(zip(big.shape, small.shape)) if a != b]
        if origin is None or value is None or big.ndim != small.ndim or len(different) > 1:
            return None
        dim = different[0] if different else None
        if dim is not None and big.shape[dim] != self._count * small.shape[dim]:
            return None
        self.substitutes[id(big)] = Substitute(origin, value, dim)
        before = torch.Size(big.shape[:dim]).numel() if dim is not None else 1
        return RowState("fixed" if dim is None else "rows", before, needs=frozenset([id(big)]))

    def _follow(self, one: _Op, other: _Op) -> None:
        tensors = [[v for v in tree_leaves((op.args, op.kwargs)) if isinstance(v, torch.Tensor)] for op in (one, other)]
        counts = rule_of(one.func) is not None and one.name in ("index", "_to_copy", "to", "expand", "slice")
        if len(tensors[0]) != len(tensors[1]):
            states = [UNKNOWN for _ in one.outs]
        else:
            operands = [self._operand(a, b, counts=counts) for a, b in zip(*tensors)]
            call = RowCall(one.name, _named(one), _named(other), list(zip(one.outs, other.outs)), operands, self._count)
            states = self._results(one, call)
        for big, small, state in zip(one.outs, other.outs, states):
            if state.kind == "mixed" and one.depends and not (big.is_floating_point() or big.dtype is torch.bool):
                state = UNKNOWN.needing(state.needs)  # indices: rows may come back to their places
            if id(big) in self._means and id(small) in self._means_of_part:
                state = self._mean_over_labels(big, small)
            if one.func._schema.is_mutable:
                self._written(one, big, state)
            self._set(big, small, state)
            if one.name in _VIEWS and tensors[0]:
                self._bases[id(self._root(big))] = self._root(tensors[0][0])

    def _mean_over_labels(self, big: torch.Tensor, small: torch.Tensor) -> RowState:
        """It is computed with the number of labels in the batch."""
        pairs = zip(self._means[id(big)][1:], self._means_of_part[id(small)][1:])
        given = [self._operand(a, b) for a, b in pairs]
        worst = next((o.state for kind in ("mixed", "unknown") for o in given if o.kind == kind), RowState("sum"))
        return worst.needing(frozenset().union(*(o.state.needs for o in given)))

    def _written(self, op: _Op, target: torch.Tensor, state: RowState) -> None:
        """What a view has is in what it is a view of."""
        base = self._bases.get(id(self._root(target)))
        while base is not None:
            before = self._states.get(id(base), FIXED)
            if state.kind in ("mixed", "unknown", "sum"):
                self._states[id(base)] = state.needing(before.needs)
            else:
                self._states[id(base)] = before.needing(state.needs)
            base = self._bases.get(id(base))

    def _results(self, op: _Op, call: RowCall) -> list[RowState]:
        kinds = {operand.kind for operand in call.operands}
        shapes_differ = any(big.shape != small.shape for big, small in call.outs)
        if op.name == "lift_fresh":  # torch.tensor(...)
            return [_constant(*call.outs[0])]
        if op.name in _CHOOSES:
            return [RowState("unknown", is_pythons=True, needs=call.needs) for _ in call.outs]
        if op.name in FACTORIES or not call.operands:
            return [self._made_by_sizes(op, call, n) for n in range(len(call.outs))]
        if "mixed" in kinds:
            worst = next(operand.state for operand in call.operands if operand.kind == "mixed")
            return [worst.needing(call.needs) for _ in call.outs]
        if "unknown" in kinds:
            pythons = any(operand.state.is_pythons for operand in call.operands)
            return [RowState("unknown", is_pythons=pythons, needs=call.needs) for _ in call.outs]
        if "sum" in kinds:
            return [self._of_sums(op, call, shapes_differ) for _ in call.outs]
        if not call.cut:
            if op.name in ("expand", "repeat"):  # each row is the same
                return [self._made_by_sizes(op, call, 0).needing(call.needs)]
            fixed = self._mixed(op, "has the number of rows among its arguments")
            fixed = fixed if shapes_differ or call.numbers_differ else FIXED
            return [fixed.needing(call.needs) for _ in call.outs]
        rule = rule_of(op.func)
        found = rule(call) if rule is not None else None
        if "batch_norm" in op.name and not op.depends:
            found = call.mixed("takes statistics over rows")
        states = [UNKNOWN] * len(call.outs) if found is None else found if isinstance(found, list) else [found]
        states = [
            RowState("mixed", why="compares each row with each") if s is UNKNOWN and _differ_twice(out) else s
            for s, out in zip(states, call.outs)
        ]
        states = [*states, *[UNKNOWN] * (len(call.outs) - len(states))]
        if not op.depends:  # a sum of the batch's own values is not the sum that a micro-batch has
            states = [self._mixed(op, "is a sum over rows") if s.kind == "sum" else s for s in states]
        return [
            (self._mixed(op, s.why) if s.kind == "mixed" else s).needing(call.needs) for s in states[: len(call.outs)]
        ]

    def _mixed(self, op: _Op, why: str) -> RowState:
        return RowState("mixed", why=f"{op.name} {why} ({op.where})")

    def _made_by_sizes(self, op: _Op, call: RowCall, n: int) -> RowState:
        big, small = call.outs[n]
        different = [d for d, (a, b) in enumerate(zip(big.shape, small.shape)) if a != b]
        if not different:
            return self._mixed(op, "has the number of rows among its arguments") if call.numbers_differ else FIXED
        if (
            len(different) > 1
            or big.ndim != small.ndim
            or big.shape[different[0]] != self._count * small.shape[different[0]]
        ):
            return UNKNOWN
        if op.name in FACTORIES or op.name in ("expand", "repeat"):
            return call.rows(different[0], out=n)
        return call.rows(0, kind="count") if op.name == "arange" and not call.big.get("start") else UNKNOWN

    def _of_sums(self, op: _Op, call: RowCall, shapes_differ: bool) -> RowState:
        """Of sums over rows, or means."""
        sums = [operand for operand in call.operands if operand.kind == "sum"]
        if shapes_differ or call.cut:
            return self._mixed(op, "takes a sum or mean over rows back to the rows").needing(call.needs)
        products = op.name.rstrip("_") in ("mul", "div")
        if (
            op.name not in LINEAR
            or (products and len(sums) > 1)
            or (op.name == "div" and call.operands[0].kind != "sum")
        ):
            return self._mixed(op, "is taken of a sum or mean over rows").needing(call.needs)
        return RowState("sum", needs=call.needs)


def _constant(big: torch.Tensor, small: torch.Tensor) -> RowState:
    if big.shape == small.shape and not big.is_meta and not small.is_meta and torch.equal(big, small):
        return FIXED
    return RowState("unknown", is_pythons=True)


def _aligned(whole: Sequence[_Op], part: Sequence[_Op]) -> Iterator[tuple[_Op, _Op]]:
    """The ops of both that are the same. (By its sizes, a linear layer is one op or two.) Results of others are unknown."""
    n = k = 0
    while n < len(whole) and k < len(part):
        steps = ((a, total - a) for total in range(_APART) for a in range(total + 1))
        for a, b in steps:
            one, other = whole[n + a : n + a + 1], part[k + b : k + b + 1]
            if one and other and one[0].func is other[0].func and one[0].where == other[0].where:
                yield one[0], other[0]
                n, k = n + a + 1, k + b + 1
                break
        else:
            return


def _differ_twice(out: tuple[torch.Tensor, torch.Tensor]) -> bool:
    big, small = out
    return big.ndim == small.ndim and sum(a != b for a, b in zip(big.shape, small.shape)) > 1


def _named(op: _Op) -> dict[str, Any]:
    """The arguments by name, with defaults."""
    arguments = op.func._schema.arguments
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    found |= dict(zip((a.name for a in arguments), op.args))
    return found | op.kwargs
