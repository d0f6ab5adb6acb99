"""Entries of the plan at the boundaries of modules, carried out on local tensors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from vescale.runtime import Placing
from vescale.static._record import Boundary, Recorder
from vescale.static._sites import map_in_order
from vescale.static._tensor_type import TensorType, UnrecordedError, type_of

__all__ = ["LocalPlacing"]


class LocalPlacing:
    """A :class:`Placing` of local tensors, with the types that were recorded.

    Attributes:
        index: which input or output, as in the instruction.
    """

    def __init__(self, index: Any, leaves: Sequence[tuple[Boundary, TensorType, TensorType]], holder: Any) -> None:
        self.index = index
        self._changes = [functools.partial(self._place, *leaf) for leaf in leaves]
        self._holder = holder

    @classmethod
    def of(cls, placing: Placing, recorder: Recorder, holder: Any) -> LocalPlacing:
        mesh = placing.runtime.mesh
        leaves = []
        for boundary in recorder.boundaries.get(placing, [[]])[0]:
            before, after = (
                type_of(r, mesh, r.value.grads if r.value is not None else ())
                for r in (boundary.input, boundary.output)
            )
            leaves.append((boundary, before, after))
        return cls(placing.index, leaves, holder)

    def __call__(self, value: Any, placed: Any = None) -> Any:
        if isinstance(value, torch.Tensor):
            if len(self._changes) != 1:
                raise UnrecordedError("a tensor at a boundary where none was recorded")
            return self._changes[0](value)
        return map_in_order(value, self._changes)

    def _place(self, boundary: Boundary, before: TensorType, after: TensorType, x: torch.Tensor) -> torch.Tensor:
        shared = self._holder.shared
        key = (id(x), boundary.stages, torch.is_grad_enabled())
        held = shared.get(key) if boundary.is_shared else None
        if held is not None and held[0] is x and held[2] == x._version:
            return held[1]
        placing = boundary.placing
        given = cast(DTensor, before.to_global(x, placing.requester))
        made = after.to_local(boundary.stages.convert(given, placing.requester, placing.outdated))
        if boundary.is_shared:
            shared[key] = x, made, x._version
        return made
