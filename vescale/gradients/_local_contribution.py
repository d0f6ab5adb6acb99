"""``LocalContribution``: what a rank's gradient of one parameter contributes to a sum over data-parallel axes."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import requested_by
from vescale.compat import DTensorSpec
from vescale.gradients._complete_gradient import local_part
from vescale.placements import move_local

__all__ = ["LocalContribution", "pending_axes", "use_code"]


class LocalContribution:
    """Turns gradients of one parameter, as they arrive, into this rank's part of a sum.

    Args:
        name: of the parameter.
        spec: of the parameter while it computes; None for a plain tensor, whose gradients are contributions as they are.
        data_parallel: axes of the spec's mesh that the sum is over.

    Attributes:
        leaves_pending: a gradient may stay Partial on other axes where the parameter is replicated, for someone else to
            reduce.
        pending: the axes on which one has stayed Partial.
    """

    def __init__(self, name: str, spec: DTensorSpec | None, data_parallel: tuple[int, ...]) -> None:
        self.name, self._spec, self._data_parallel = name, spec, data_parallel
        self.leaves_pending = False
        self.pending: frozenset[int] = frozenset()

    def of(self, gradient: torch.Tensor, earlier: torch.Tensor | None, *, of_one_loss: bool) -> torch.Tensor | None:
        """This rank's contribution; None: nothing, for another rank has it all. Communicates what is placed otherwise than
        the parameter on axes that are not data-parallel, unless it is left pending.

        ``of_one_loss``: gradients are contributions to one global loss. Then along data-parallel axes a gradient may come
        as a sum, or whole (the batch is not cut there): of the latter the first rank's counts. ``earlier`` holds what was
        accumulated before; where it was whole along an axis on which this gradient is a sum, it becomes one.
        """
        spec, local = self._spec, local_part(gradient)
        if spec is None or not isinstance(gradient, DTensor):
            return local
        arrival, leaves_pending = tuple(gradient.placements), self.leaves_pending
        steps = _steps(
            arrival, tuple(spec.placements), tuple(spec.mesh.shape), self._data_parallel, of_one_loss, leaves_pending
        )
        if steps.target != arrival:
            with requested_by(f"{self.name}.grad"):
                local = move_local(local, spec.mesh, gradient.shape, arrival, steps.target).wait()
        if not of_one_loss:
            return local
        coordinate = spec.mesh.get_coordinate()
        assert coordinate is not None
        new = steps.pending - self.pending
        if new and earlier is not None and any(coordinate[axis] for axis in new):
            earlier.zero_()
        self.pending |= steps.pending
        if any(coordinate[axis] for axis in steps.whole | (self.pending - steps.pending)):
            return None
        return local if steps.divisor == 1 else local / steps.divisor


class _Steps(NamedTuple):
    """From an arriving gradient to a contribution: the placements that it is brought to first, the divisor of an average,
    the data-parallel axes along which every rank has all of it, other axes along which it stays a sum."""

    target: tuple[Placement, ...]
    divisor: int
    whole: frozenset[int]
    pending: frozenset[int]


@functools.lru_cache(maxsize=4096)
def _steps(
    arrival: tuple[Placement, ...],
    parameter: tuple[Placement, ...],
    sizes: tuple[int, ...],
    data_parallel: tuple[int, ...],
    of_one_loss: bool,
    leaves_pending: bool,
) -> _Steps:
    if not of_one_loss:
        target = tuple(f if axis in data_parallel else w for axis, (f, w) in enumerate(zip(arrival, parameter)))
        return _Steps(target, 1, frozenset(), frozenset())
    adds = frozenset(a for a, p in enumerate(arrival) if type(p) is Partial and p.reduce_op in ("sum", "avg"))
    others = adds.difference(data_parallel) if leaves_pending else frozenset()
    whole = frozenset(data_parallel) - adds
    left = frozenset(axis for axis in others if isinstance(parameter[axis], Replicate))
    pending = frozenset(axis for axis in left if sizes[axis] > 1)  # one rank's sum is complete
    kept = adds.intersection(data_parallel) | left
    divisor = math.prod(sizes[axis] for axis in kept if arrival[axis].is_partial("avg"))
    placed = [Replicate() if axis in whole else wanted for axis, wanted in enumerate(parameter)]
    return _Steps(tuple(arrival[a] if a in kept else p for a, p in enumerate(placed)), divisor, whole, pending)


def use_code(pending: frozenset[int]) -> int:
    """For a parameter that has a gradient, a number that ranks can take the maximum of: 1, and a bit for each axis along
    which it is pending. 0 stands for no gradient."""
    return 1 + sum(1 << axis for axis in pending)


def pending_axes(code: int) -> frozenset[int]:
    return frozenset(axis for axis in range(code.bit_length()) if (code - 1) >> axis & 1)
