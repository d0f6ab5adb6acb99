"""``ShownEntries``: what modules show in a static forward in place of their attributes, parameters and buffers; what entries
of the plan place there, and the outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import local_of, native_static
from vescale.runtime import Placing
from vescale.static._gradients import (
    Shown,
    refuse_second_derivatives,
    shown_local,
    with_attributes,
    without_gradient,
)
from vescale.static._hidden_tensors import hidden_slots
from vescale.static._tensor_type import TensorType, UnrecordedError, map_in_order


class ShownEntries:
    """Entries of modules' ``__dict__``, set during a forward. Those of parameters and buffers are their local tensors, which
    stand in front of the DTensors.
    """

    def __init__(self) -> None:
        self._native = native_static()
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._last = self._values
        self._own: tuple[list[dict[str, Any]], list[str], list[Any]] = [], [], []
        # DTensors, with the placements of their local gradients (None: there are none) and the entries that show them.
        self._tensors: list[DTensor] = []
        self._grads: list[tuple[Placement, ...] | None] = []
        self._entries: list[range] = []
        # As of the last forward with gradients, whose linked tensors are among the values.
        self._locals: list[torch.Tensor] = []
        self._linked: list[Shown] = []
        self._addresses: list[int] = []

    def add(self, held: dict[str, Any], name: str, value: Any) -> None:
        if name in held:  # it stands there again after the forward
            dicts, names, values = self._own
            dicts.append(held)
            names.append(name)
            values.append(held[name])
        self._dicts.append(held)
        self._names.append(name)
        self._values.append(value)

    def add_tensor(
        self, x: DTensor, places: list[tuple[dict[str, Any], str]], grad: tuple[Placement, ...] | None
    ) -> None:
        """Add a parameter or buffer.

        Args:
            places: the ``__dict__`` of each module that has it, and its name there.
            grad: placements of the local gradients; None: there are none.
        """
        first = len(self._dicts)
        for held, name in places:
            self.add(held, name, None)
        self._tensors.append(x)
        self._grads.append(grad)
        self._entries.append(range(first, len(self._dicts)))

    def tensors(self) -> Iterator[tuple[DTensor, range]]:
        """Parameters and buffers, and the numbers of the entries that show each, in :attr:`last`."""
        yield from zip(self._tensors, self._entries, strict=True)

    @property
    def last(self) -> list[Any]:
        """What the last :meth:`show` has shown."""
        return self._last

    def show(self) -> None:
        values = self._values
        if torch.is_grad_enabled():
            if not self._locals or not self._native.have_locals(self._tensors, self._locals, self._addresses):
                self._link()
        else:
            values = values.copy()
            for x, entries in zip(self._tensors, self._entries):
                for entry in entries:
                    values[entry] = with_attributes(x)
        self._last = values
        self.show_again()

    def show_again(self) -> None:
        """What the last :meth:`show` has shown."""
        self._native.set_entries(self._dicts, self._names, self._last)

    def keep_written(self) -> None:
        """Before :meth:`hide`: ``self.count += 1`` has made the local tensor of a buffer the buffer."""
        for x, entries in zip(self._tensors, self._entries):
            for entry in entries:
                held, name = self._dicts[entry], self._names[entry]
                buffers = held["_buffers"]
                if name in buffers and buffers[name] is held[name]:
                    buffers[name] = x

    def hide(self) -> None:
        self._native.delete_entries(self._dicts, self._names)
        self._native.set_entries(*self._own)

    def _link(self) -> None:
        """Local tensors, of which some are others than in the last forward."""
        self._locals = [local_of(x) for x in self._tensors]
        self._addresses = [local.data_ptr() for local in self._locals]
        names = [self._names[entries[0]] for entries in self._entries]
        self._linked = list(map(shown_local, self._tensors, self._grads, names))
        for shown, entries in zip(self._linked, self._entries, strict=True):
            for entry in entries:
                self._values[entry] = shown.tensor


# Entries of the plan at the boundaries of modules, carried out on local tensors.


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


# Outputs of a model in static mode, as DTensors.


def handed_out(result: Any, outputs: Sequence[TensorType], hidden: Sequence[TensorType]) -> Any:
    """What a forward has returned, with DTensors of these types; ``hidden``: of tensors in its objects."""
    if type(result) is torch.Tensor and len(outputs) == 1 and not hidden:
        return _hand_out(outputs[0], result)
    slots = hidden_slots(result)
    if len(slots) != len(hidden):
        raise UnrecordedError("objects in the output hold different tensors than recorded")
    for slot, kind in zip(slots, hidden, strict=True):
        slot.set(_hand_out(kind, slot.get()))
    return map_in_order(result, [functools.partial(_hand_out, kind) for kind in outputs])


def _hand_out(kind: TensorType, local: torch.Tensor) -> torch.Tensor:
    """An output as a DTensor."""
    x = kind.to_global(local, "output")
    if kind.grad is None and x.requires_grad and isinstance(x, DTensor):
        x = without_gradient(x, "an output")
    if x.grad_fn is not None and x is not local:
        x.grad_fn.register_prehook(refuse_second_derivatives)
    return x
