"""Entries of the plan at the boundaries of modules, carried out on local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.runtime import Placing
from vescale.static._record import Boundary, Recorder
from vescale.static._sites import map_in_order
from vescale.static._tensor_type import TensorType, UnrecordedError, merged_types, types_of

__all__ = ["LocalPlacing", "merged_boundaries"]


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A tensor among those that an entry places. ``shared_key``: of its conversion, which other entries share; None: nobody
    does."""

    before: TensorType
    after: TensorType
    move: Callable[[DTensor], DTensor]
    requester: str
    shared_key: Any

    @classmethod
    def of(cls, boundary: Boundary, before: TensorType, after: TensorType) -> _Leaf:
        assert before.placements is not None
        requester = boundary.placing.requester
        move = boundary.stages.prepared(before.placements, requester)
        return cls(before, after, move, requester, boundary.stages if boundary.is_shared else None)

    def convert(self, x: torch.Tensor) -> torch.Tensor:
        return self.after.to_local(self.move(cast(DTensor, self.before.to_global(x, self.requester))))


def merged_boundaries(
    calls: Sequence[Sequence[Boundary]], mesh: DeviceMesh
) -> list[tuple[Boundary, TensorType, TensorType]] | None:
    """The tensors that an entry places, with their types before and after; None if its calls differ."""
    before = merged_types([types_of([one.input for one in call], mesh) for call in calls])
    after = merged_types([types_of([one.output for one in call], mesh) for call in calls])
    if before is None or after is None or any({one.stages for one in leaf} != {leaf[0].stages} for leaf in zip(*calls)):
        return None
    return list(zip(calls[0] if calls else (), before, after, strict=True))


class LocalPlacing:
    """A :class:`Placing` of local tensors, with the types that were recorded.

    Attributes:
        index: which input or output, as in the instruction.
    """

    def __init__(self, index: Any, leaves: Sequence[_Leaf], holder: Any) -> None:
        self.index = index
        self._changes = [functools.partial(self._place, leaf) for leaf in leaves]
        self._holder = holder

    @classmethod
    def of(cls, placing: Placing, recorder: Recorder, holder: Any) -> LocalPlacing:
        mesh = placing.runtime.mesh
        leaves = [_Leaf.of(*one) for one in merged_boundaries(recorder.boundaries.get(placing, []), mesh) or ()]
        return cls(placing.index, leaves, holder)

    def __call__(self, value: Any, placed: Any = None) -> Any:
        if isinstance(value, torch.Tensor):
            if len(self._changes) != 1:
                raise UnrecordedError("a tensor at a boundary where none was recorded")
            return self._changes[0](value)
        return map_in_order(value, self._changes)

    def _place(self, leaf: _Leaf, x: torch.Tensor) -> torch.Tensor:
        if leaf.shared_key is None:
            return leaf.convert(x)
        shared: dict[Any, Any] = self._holder.shared
        key = (id(x), leaf.shared_key, torch.is_grad_enabled())
        held = shared.get(key)
        if held is not None and held[0] is x and held[2] == x._version:
            found: torch.Tensor = held[1]
            return found
        made = leaf.convert(x)
        shared[key] = x, made, x._version
        return made
