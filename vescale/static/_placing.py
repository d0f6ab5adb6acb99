"""Entries of the plan at the boundaries of modules, carried out on local tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from vescale.compat import native_static
from vescale.runtime import Placing
from vescale.static._tensor_type import TensorType


@dataclass(frozen=True, eq=False)
class PlacedTensor:
    """A tensor that an entry places. ``shared_key``: of its conversion, which other entries share; None: nobody does."""

    before: TensorType
    after: TensorType
    move: Callable[[DTensor], DTensor]
    move_local: Callable[[torch.Tensor], torch.Tensor | None]
    """The whole conversion in C++; None: Python has to."""
    requester: str
    shared_key: Any

    @classmethod
    def of(cls, placing: Placing, before: TensorType, after: TensorType) -> PlacedTensor:
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
