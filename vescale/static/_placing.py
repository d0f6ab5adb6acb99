"""Entries of the plan at the boundaries of modules, carried out on local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.compat import native_static
from vescale.runtime import Placing
from vescale.static._call_site_functions import map_in_order
from vescale.static._step_records import Boundary
from vescale.static._tensor_type import TensorType, UnrecordedError, merged_types, types_of

_PLAIN = frozenset((type(None), bool, int, float, str))  # an entry for all inputs passes them on


@dataclass(frozen=True)
class PlacedTensor:
    """The types of a tensor that an entry places, before and after. ``communication``: collectives that it started."""

    before: TensorType
    after: TensorType
    communication: tuple[str, ...] = ()


def leaf_of(placing: Placing, placed: PlacedTensor) -> _Leaf:
    """A conversion of one tensor, by an entry of the plan."""
    return _Leaf.of(placing, placed)


@dataclass(frozen=True, eq=False)
class _Leaf:
    """A tensor among those that an entry places. ``shared_key``: of its conversion, which other entries share; None: nobody
    does."""

    before: TensorType
    after: TensorType
    move: Callable[[DTensor], DTensor]
    move_local: Callable[[torch.Tensor], torch.Tensor | None]
    """The whole conversion in C++; None: Python has to."""
    requester: str
    shared_key: Any

    @classmethod
    def of(cls, placing: Placing, placed: PlacedTensor) -> _Leaf:
        before, after = placed.before, placed.after
        assert before.placements is not None
        stages, is_shared = placing.conversion(len(before.factors))
        prepared = stages.prepared(before.placements, placing.requester)
        local = native_static().LocalConversion(
            before.mesh,
            before.placements,
            before.factors,
            before.sizes,
            before.local_grad,
            prepared.target,
            prepared.stages,
            placing.requester,
            after.local_grad,
            after.accept,
        )
        if before.grad_cut is not None or after.grad_cut is not None:
            local = _in_python
        return cls(before, after, prepared, local, placing.requester, stages if is_shared else None)

    @functools.cached_property
    def convert(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function, which takes less time than a method."""
        before, after, move, move_local, requester = self.before, self.after, self.move, self.move_local, self.requester

        def convert(x: torch.Tensor) -> torch.Tensor:
            made = move_local(x)
            if made is not None:
                return made
            return after.to_local(move(cast(DTensor, before.to_global(x, requester))))

        return convert


def _in_python(_: torch.Tensor) -> None:
    """In place of a conversion in C++."""


def placed_tensors(calls: Sequence[Sequence[Boundary]], mesh: DeviceMesh) -> tuple[PlacedTensor, ...] | None:
    """The tensors that an entry places; None if its calls differ."""
    before = merged_types([types_of([one.input for one in call], mesh) for call in calls])
    after = merged_types([types_of([one.output for one in call], mesh) for call in calls])
    if before is None or after is None:
        return None
    communication = [tuple(one.communication) for one in calls[0]] if calls else []
    return tuple(map(PlacedTensor, before, after, communication))


class LocalPlacing:
    """A :class:`Placing` of local tensors, with the types that were recorded.

    Attributes:
        index: which input or output, as in the instruction.
    """

    def __init__(self, index: Any, leaves: Sequence[_Leaf], holder: Any) -> None:
        self.index = index
        self._holder = holder
        self._changes = [
            leaf.convert if leaf.shared_key is None else functools.partial(self._place, leaf) for leaf in leaves
        ]
        self._only = self._changes[0] if len(leaves) == 1 else None

    @classmethod
    def of(cls, placing: Placing, placed: Sequence[PlacedTensor], holder: Any) -> LocalPlacing:
        return cls(placing.index, [_Leaf.of(placing, one) for one in placed], holder)

    def __call__(self, value: Any, placed: Any = None) -> Any:
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            if self._only is None:
                raise UnrecordedError("a tensor at a boundary where none was recorded")
            return self._only(value)
        if type(value) in _PLAIN:
            return value
        return map_in_order(value, self._changes)

    def _place(self, leaf: _Leaf, x: torch.Tensor) -> torch.Tensor:
        """Of a conversion that other entries share."""
        shared: dict[Any, Any] = self._holder.shared
        key = (id(x), leaf.shared_key, torch.is_grad_enabled())
        held = shared.get(key)
        if held is not None and held[0] is x and held[2] == x._version:
            found: torch.Tensor = held[1]
            return found
        made = leaf.convert(x)
        shared[key] = x, made, x._version
        return made
