"""``EarlyInputs``: plain inputs of a model become local tensors in one step, where a static forward follows."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, native_static
from vescale.ir import Wrap
from vescale.ops import wrap_global
from vescale.runtime import Frame

_MAX_ENTRIES = 64

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
        self._entries: dict[tuple[bytes, bool], tuple[str, weakref.ref[Any], list[Cut | None]]] = {}
        self._native = native_static()
        self._thread = threading.local()

    def find(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], is_training: bool
    ) -> tuple[str, weakref.ref[Any], list[Cut | None]] | None:
        """The key of the program, that, and what happens to each input; None: inputs like these have not been seen."""
        if not self._entries:
            return None
        key = self._native.inputs_key(args, kwargs)
        return None if key is None else self._entries.get((key, is_training))

    def remember(
        self,
        key: str,
        program: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        frame: Frame,
        is_training: bool,
    ) -> None:
        """After a static step of ``program``; ``args``, ``kwargs``: what the entries of the plan have made of the inputs."""
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
            cuts.append((one.result.device_mesh, self._native.kept(tuple(one.result.placements))))
        names = dict(zip(kwargs, given[len(args) :], strict=True))
        described = self._native.inputs_key(tuple(given[: len(args)]), names)
        if described is not None:
            if len(self._entries) >= _MAX_ENTRIES:
                self._entries.clear()
            self._entries[described, is_training] = key, weakref.ref(program), cuts

    def enter(
        self, key: str, program: Any, cuts: Sequence[Cut | None], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The local tensors, which :meth:`take` recognizes."""
        values: list[Any] = []
        made: dict[Any, Any] = {}  # a tensor that is passed twice stays one
        for value, cut in zip((*args, *kwargs.values()), cuts, strict=True):
            if cut is not None:
                what = id(value), id(cut[0]), cut[1]
                if what not in made:
                    part = self._native.local_part(value, *cut)
                    made[what] = local_of(wrap_global(value, *cut)) if part is None else part
                value = made[what]
            values.append(value)
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
