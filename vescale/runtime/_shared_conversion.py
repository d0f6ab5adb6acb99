"""One conversion for all modules that get the same tensor with equal ``<in>`` entries (query, key and value projections).

It is one all-gather in forward instead of three, and one reduction in backward instead of three, because autograd adds the
gradients of the one result first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, versions
from vescale.ops import PreparedConversion, convert, stages_between
from vescale.runtime._activation import current_activation

__all__ = ["Stages", "stages_of"]

Stage = Sequence[Placement | None]


class Stages:
    """A conversion: the placements of the tensor, and those of its gradient (see ``convert``).

    There is one object for all equal ones (:func:`stages_of`), so that they are compared by identity.
    """

    def __init__(self, target: Stage, grad_source: Stage | None, grad_target: Stage | None) -> None:
        self._target, self._grad_source, self._grad_target = target, grad_source, grad_target

    def convert(self, x: DTensor, requester: str, outdated: Callable[[], None]) -> DTensor:
        return convert(
            x,
            self._target,
            grad_source=self._grad_source,
            grad_target=self._grad_target,
            requester=requester,
            outdated=outdated,
        )

    def prepared(self, placements: tuple[Placement, ...], requester: str) -> PreparedConversion:
        """:meth:`convert` of tensors with these placements, to which nobody writes, for many calls."""
        target, grad_source, grad_target = (
            None if stage is None else tuple(stage) for stage in (self._target, self._grad_source, self._grad_target)
        )
        assert target is not None
        return PreparedConversion(placements, target, (grad_source, grad_target), requester)

    def bound(self, x: DTensor) -> tuple[object, object]:
        """Target and stages of the gradient, as :meth:`convert` passes them to C++ for tensors placed as ``x``."""
        target, source, last = (
            None if stage is None else tuple(stage) for stage in (self._target, self._grad_source, self._grad_target)
        )
        assert target is not None
        return stages_between(tuple(x.placements), target, source, last, False)

    def convert_once(self, x: DTensor, requester: str, outdated: Callable[[], None]) -> DTensor:
        """:meth:`convert`, or its earlier result within the forward of the module that passes ``x`` on.

        Results are kept until that module returns, and their sources, so that no other tensor gets the ``id`` of one. A
        write to either ends the sharing, also one to a local tensor (``to_local()``), and a change of what requires a
        gradient. Tensors of inference mode have no version, and are not shared.
        """
        activation = current_activation()
        if activation is None or x.is_inference():
            return self.convert(x, requester, outdated)
        made = activation.frames[-1].converted
        key = (id(x), self, torch.is_grad_enabled())
        held = made.get(key)
        if held is not None:
            _, result, before = held
            if before == _state(x, result):
                return result
        result = self.convert(x, requester, outdated)
        made[key] = x, result, _state(x, result)
        return result


def _state(x: DTensor, result: DTensor) -> tuple[object, ...]:
    """What changes with what ``x`` and ``result`` hold."""
    return (*versions(x), *versions(result), x.requires_grad, id(local_of(x)))


@functools.cache
def stages_of(
    target: tuple[Placement | None, ...],
    grad_source: tuple[Placement | None, ...] | None,
    grad_target: tuple[Placement | None, ...] | None,
) -> Stages:
    return Stages(target, grad_source, grad_target)
