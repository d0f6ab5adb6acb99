"""What is known of a tensor of a forward about the rows of the batch: :class:`RowState`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch


def cut_dim(big: Sequence[int], small: Sequence[int], count: float) -> int | None:
    """The only dim in which two shapes differ, if the larger one has ``count`` of the smaller one there."""
    different = [d for d, (a, b) in enumerate(zip(big, small)) if a != b]
    is_cut = len(big) == len(small) and len(different) == 1 and big[different[0]] == count * small[different[0]]
    return different[0] if is_cut else None


@dataclass(frozen=True)
class RowState:
    """How the tensor of a batch is made of those of its micro-batches.

    Attributes:
        kind: ``fixed``: it is the same in each micro-batch. ``rows``: it is theirs side by side. ``sum``: it is a number
            (``scale``) times their sum. ``count``: ``rows``, plus the number of rows before the micro-batch
            (``arange(len(x))``). ``mixed``: it is made of rows of several micro-batches otherwise. ``unknown``: there is no
            rule for an op.
        before: of ``rows``, in the flat tensor, the elements are ``[before, micro-batches, ...]``.
        scale: of ``sum``: 1, and of a mean one by the number of micro-batches.
        of_labels: of ``sum``: it is made of means over labels alone.
        why: of ``mixed``, for a message.
        is_pythons: it is made of numbers that Python has read from rows, or of rows that values choose, and so cannot be
            computed of another batch with the same shapes.
        is_chosen: values tell how many elements it is made of: that they are as many times those of the first micro-batch as
            there are micro-batches is chance.
        needs: the values that a micro-batch has to take from the whole batch for this to hold, by id.
    """

    kind: str
    before: int = 1
    scale: float = 1.0
    of_labels: bool = False
    why: str = ""
    is_pythons: bool = False
    is_chosen: bool = False
    needs: frozenset[int] = frozenset()

    @property
    def weight(self) -> float:
        """Of micro-batches' sums, in which means over labels alone are shares already."""
        return 1.0 if self.of_labels else self.scale

    def needing(self, needs: Iterable[int]) -> RowState:
        return replace(self, needs=self.needs.union(needs))


FIXED = RowState("fixed")
UNKNOWN = RowState("unknown")


@dataclass(frozen=True, eq=False)
class Operand:
    """A tensor of the batch, and that of a micro-batch; ``dim`` has the micro-batches: ``[outer, micro-batches, ...]``."""

    big: torch.Tensor
    small: torch.Tensor
    state: RowState
    dim: int = -1
    outer: int = 1

    @property
    def kind(self) -> str:
        return self.state.kind

    @property
    def is_cut(self) -> bool:
        return self.kind in ("rows", "count")

    @classmethod
    def of(cls, big: torch.Tensor, small: torch.Tensor, state: RowState, count: int) -> Operand:
        """With ``unknown`` for rows that are in no dim."""
        if state.kind not in ("rows", "count"):
            return cls(big, small, state)
        dim = cut_dim(big.shape, small.shape, count)
        if dim is not None:
            outer, rest = divmod(state.before, math.prod(big.shape[:dim]))
            if not rest and outer and small.shape[dim] % outer == 0:
                return cls(big, small, state, dim, outer)
        if big.numel() == count * small.numel() and big.ndim == small.ndim and big.shape != small.shape:
            return cls(big, small, RowState("mixed", why="mixes rows of several micro-batches", needs=state.needs))
        return cls(big, small, UNKNOWN.needing(state.needs))


@dataclass(frozen=True)
class RowCall:
    """A call of an op, for the whole batch and for a micro-batch.

    Attributes:
        name: of the op, without overload.
        big, small: the arguments by name.
        outs: the results of both.
        operands: of all tensors among the arguments, in order.
        count: the number of micro-batches.
    """

    name: str
    big: dict[str, Any]
    small: dict[str, Any]
    outs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    operands: Sequence[Operand]
    count: int

    def operand(self, name: str) -> Operand | None:
        value = self.big.get(name)
        return next((o for o in self.operands if o.big is value), None)

    @property
    def cut(self) -> list[Operand]:
        return [operand for operand in self.operands if operand.is_cut]

    @property
    def needs(self) -> frozenset[int]:
        return frozenset().union(*(operand.state.needs for operand in self.operands))

    @property
    def numbers_differ(self) -> bool:
        """Whether an argument is another number for a micro-batch: the number of rows, mostly."""
        return any(isinstance(v, int | float) and v != self.small.get(name) for name, v in self.big.items())

    def rows(self, dim: int, outer: int = 1, out: int = 0, kind: str = "rows") -> RowState:
        """A result with the micro-batches in ``dim``."""
        shape = self.outs[out][0].shape
        return RowState(kind, math.prod(shape[:dim]) * outer)

    def sum(self, *, is_mean: bool = False) -> RowState:
        return RowState("sum", scale=1 / self.count if is_mean else 1.0)

    def mixed(self, why: str) -> RowState:
        return RowState("mixed", why=why)
