"""The record of ops on tensors that have no values yet: which op writes which storage, in program order.

Every deferred storage has a :class:`Record`, the list of ops that write it. A tensor is a :class:`View` of a record; taking
a view is not an op. The values of a view at a time are those after all writes before that time. Writes whose values are
overwritten are dead: a write that fills the whole storage makes all earlier ones dead. A graph is freed with its tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.compat.tensor_subclasses import tree_leaves
from vescale.errors import MaterializeError
from vescale.rng._random_ops import RandomOp
from vescale.rng._stream_spans import is_contiguous

aten = torch.ops.aten
_OVERWRITES = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default}
_CLOCK = itertools.count()


def next_time() -> int:
    """Program order of recorded ops; later is larger."""
    return next(_CLOCK)


@dataclass(eq=False)
class Record:
    """A storage without memory: its size, its device, and the ops that write it, oldest first."""

    num_bytes: int
    device: torch.device
    writes: list[Op] = field(default_factory=list)


@dataclass(frozen=True)
class View:
    """A tensor as the geometry of its view of a record, in elements of its dtype."""

    record: Record
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def covers(self) -> bool:
        """Whether the view contains every element of the storage exactly once."""
        order = sorted(range(len(self.shape)), key=lambda dim: -self.strides[dim])
        dense = is_contiguous([self.shape[dim] for dim in order], [self.strides[dim] for dim in order])
        return dense and self.offset == 0 and self.numel * self.dtype.itemsize == self.record.num_bytes

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor with this geometry on a real storage."""
        tensor: Any = torch.empty(0, dtype=self.dtype, device=storage.device)
        result: torch.Tensor = tensor.set_(storage, self.offset, self.shape, self.strides)
        return result


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor with values that an op reads; its values must not change until the op is replayed."""

    tensor: torch.Tensor
    version: int

    def value(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise MaterializeError(
                f"a tensor of shape {tuple(self.tensor.shape)} was read inside deferred_init() and written afterwards, so "
                "that the values it had then are gone; expected no writes before materialize(): give the constructor a "
                "clone of it"
            )
        return self.tensor


@dataclass(frozen=True)
class Initializer:
    """An initializer that consists of elementwise ops and random fills: ``function(tensor, *arguments, generator)``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Op:
    """One recorded op.

    Attributes:
        func, args, kwargs: the call; its tensors are :class:`View` or :class:`Constant`.
        results: the call's tensors in order; None for those that are views of an input.
        written: the inputs that it changes.
        draws: for random fills of ``written[0]``: what is drawn, from a generator in the state ``state``. ``func`` is
            then not called; ``args[1:]`` holds the tensor argument, if any.
    """

    time: int
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[View | None, ...] = ()
    written: tuple[View, ...] = ()
    draws: RandomOp | Initializer | None = None
    state: bytes = b""

    @property
    def overwrites(self) -> bool:
        """Whether the op ignores the values that ``written`` held before."""
        return self.draws is not None or self.func in _OVERWRITES

    def replaces(self, record: Record) -> bool:
        """Whether the op makes all earlier values of the record dead."""
        if any(result is not None and result.record is record for result in self.results):
            return True
        return self.overwrites and self.written[0].record is record and self.written[0].covers()

    def reads(self) -> Iterator[View]:
        """The views whose values the op uses."""
        leaves = tree_leaves((self.args, self.kwargs))
        for leaf in leaves[1:] if self.overwrites else leaves:
            if isinstance(leaf, View):
                yield leaf


def live_writes(record: Record, time: int) -> list[Op]:
    """The writes before ``time`` on which the values at ``time`` depend directly, oldest first."""
    writes = [op for op in record.writes if op.time < time]
    for index in range(len(writes) - 1, -1, -1):
        if writes[index].replaces(record):
            return writes[index:]
    return writes


def needed_ops(record: Record, time: int) -> list[Op]:
    """All ops on which the values of the record at ``time`` depend, in program order.

    If they run in this order, every storage has the right values whenever one of them reads it: an op that writes other
    values to a storage is followed by the op that overwrites them before they are read.
    """
    found: dict[int, Op] = {}
    seen: set[tuple[int, int]] = set()
    todo = [(record, time)]
    while todo:
        record, time = todo.pop()
        if (id(record), time) in seen:
            continue
        seen.add((id(record), time))
        for op in live_writes(record, time):
            if op.time not in found:
                found[op.time] = op
                todo += [(view.record, op.time) for view in op.reads()]
                # A storage that an op writes in part must have its earlier values. (Those of this record are
                # among its live writes already.)
                partial = (view.record for view in op.written if not op.replaces(view.record))
                todo += [(other, op.time) for other in partial if other is not record]
    return [found[key] for key in sorted(found)]
