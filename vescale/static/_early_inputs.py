"""``EarlyInputs``: plain inputs of a model become local tensors in one step, where a static forward follows."""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, native_static
from vescale.ir import Wrap
from vescale.ops import wrap_global
from vescale.runtime import Frame

__all__ = ["EarlyInputs", "Entered"]

_MAX_ENTRIES = 64
_CONSTANTS = frozenset((type(None), bool, int, float, str))

Cut = tuple[DeviceMesh, tuple[Placement, ...]]  # of an input; None in its place: it stays


class Entered(NamedTuple):
    """Inputs of a forward that have become local tensors.

    Attributes:
        key, program: of what runs on them.
        args, kwargs: as they were given.
        local_args, local_kwargs: what they have become.
    """

    key: str
    program: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    local_args: tuple[Any, ...]
    local_kwargs: dict[str, Any]


class EarlyInputs:
    """Most models get plain tensors, which an entry of the plan makes DTensors, and whose local tensors a static forward
    takes. For inputs like those of a static step before (equal shapes, dtypes and numbers), the DTensors are left out. What
    decides about a program beside its inputs is compared as for all others.
    """

    def __init__(self) -> None:
        self._entries: dict[Any, tuple[str, list[Cut | None]]] = {}
        self._thread = threading.local()

    def find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, list[Cut | None]] | None:
        """The key of the program, and what happens to each input; None: inputs like these have not been seen."""
        if not self._entries:
            return None
        described = _description(args, kwargs)
        return None if described is None else self._entries.get(described)

    def remember(self, key: str, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame) -> None:
        """After a static step: ``args`` and ``kwargs`` are what the entries of the plan have made of the inputs."""
        placed = {id(one.result): one for one in frame.placed or ()}
        given, cuts = [], list[Cut | None]()
        for value in (*args, *kwargs.values()):
            one = placed.get(id(value))
            if one is None:
                given.append(value)
                cuts.append(None)
                continue
            op = one.instruction.op
            if not isinstance(op, Wrap) or op.given != "global":
                return
            given.append(one.given)
            cuts.append((one.result.device_mesh, native_static().kept(tuple(one.result.placements))))
        names = dict(zip(kwargs, given[len(args) :], strict=True))
        described = _description(tuple(given[: len(args)]), names)
        if described is not None:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            self._entries[described] = key, cuts

    def enter(
        self, key: str, program: Any, cuts: Sequence[Cut | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The local tensors, which :meth:`take` recognizes."""
        values = []
        for value, cut in zip((*args, *kwargs.values()), cuts, strict=True):
            values.append(value if cut is None else local_of(wrap_global(value, *cut)))
        local_args, local_kwargs = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))
        self._thread.entered = Entered(key, program, args, kwargs, local_args, local_kwargs)
        return local_args, local_kwargs

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entered | None:
        """What :meth:`enter` has made these of; None: they are other inputs."""
        entered: Entered | None = getattr(self._thread, "entered", None)
        if entered is None:
            return None
        self._thread.entered = None
        if len(args) != len(entered.local_args) or kwargs.keys() != entered.local_kwargs.keys():
            return None
        others = map(entered.local_kwargs.__getitem__, kwargs)
        is_same = all(map(operator.is_, args, entered.local_args)) and all(map(operator.is_, kwargs.values(), others))
        return entered if is_same else None


def _description(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What decides about plain inputs; None: some are of other kinds."""
    found: list[Any] = [native_static().thread_settings(), len(args), *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor:
            if value.requires_grad or value.layout is not torch.strided or value.is_inference():
                return None
            found.append((value.dtype, value.device, value.shape))
        elif kind in _CONSTANTS:
            found.append((kind, value))
        else:
            return None
    return tuple(found)
