"""``Entry``: one parameter, how its gradients come, and how they get home."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.compat import AsyncCollectiveTensor, local_of, make_dtensor, make_spec
from vescale.placements import local_region, move_local
from vescale.runtime._gradients._complete import is_marked_complete, mark_complete
from vescale.runtime._gradients._reduction import Arrival, Contribution, Home, Policy, contribution
from vescale.runtime._gradients._slot import Slot

__all__ = ["Entry", "GradientRule", "local_part"]


@dataclass(frozen=True)
class GradientRule:
    """What is known of one parameter's gradient beforehand.

    Attributes:
        source: what each rank's gradient is, whatever it says of itself; None on an axis: what it says.
        target: where it goes; None on an axis: as the parameter lies there.
    """

    source: tuple[Placement | None, ...] | None = None
    target: tuple[Placement | None, ...] | None = None


class Entry:
    """One parameter of a reducer.

    Attributes:
        index: its number, the same on every rank; -1 until ranks have agreed on it.
        home: where its gradient belongs.
        slots: its places in buckets, one for each way in which its gradient comes.
        plain_slot: the one that a plain gradient of the parameter's dtype goes to.
        carry: a complete gradient that was there before this backward, kept aside until the new one is added to it.
        is_offered: whether ranks have agreed on a place, if they knew of one, although no gradient had come.
    """

    def __init__(self, name: str, parameter: nn.Parameter, rule: GradientRule, policy: Policy) -> None:
        self.index = -1
        self.name, self.parameter = name, parameter
        self.home = _home(parameter, rule)
        self.slots: list[Slot] = []
        self.plain_slot: Slot | None = None
        self.carry: torch.Tensor | None = None
        self.is_offered = False
        self._shown: Callable[[], torch.Tensor | None] = lambda: None  # a contribution, while there is a carry
        self._version = 0
        self._rule, self._policy = rule, policy
        self._known: dict[Arrival, Contribution] = {}
        self._usual: Arrival | None = None  # how the last gradient came: the next one most likely comes the same way

    def describe(self) -> str:
        """For ranks to compare."""
        placed = list(map(str, self.home.target)) if self.home.mesh is not None else "plain"
        frozen = "" if self.parameter.requires_grad else ", frozen"
        return f"{self.name} {self.home.shape} {self.parameter.dtype} {placed}{frozen}"

    def slot(self, arrival: Arrival, way: Contribution, num_expected: int) -> Slot:
        """A new one, that is not among the entry's yet."""
        is_plain = self.home.mesh is None and arrival.dtype == self.parameter.dtype
        return Slot(self.name, self, arrival, way, num_expected, self.parameter if is_plain else None)

    def add_slot(self, slot: Slot) -> None:
        self.slots.append(slot)
        if self.home.mesh is None and slot.arrival.dtype == self.parameter.dtype and self.plain_slot is None:
            self.plain_slot = slot

    def drop_slots(self) -> None:
        """All places are given anew."""
        self.slots.clear()
        self.plain_slot, self.is_offered = None, False

    # How gradients come

    def arrival_of(self, gradient: torch.Tensor) -> Arrival:
        placements = self._placements_of(gradient)
        usual = self._usual
        if usual is None or usual.placements != placements or usual.dtype != gradient.dtype:
            self._usual = usual = Arrival(placements, gradient.dtype)
        return usual

    def _placements_of(self, gradient: torch.Tensor) -> tuple[Placement, ...] | None:
        if self.home.mesh is None:
            return None
        if isinstance(gradient, DTensor):
            placements = tuple(gradient.placements)
        else:  # of one that is no DTensor every rank has the same
            placements = (Replicate(),) * len(self.home.target)
        return _filled(self._rule.source, placements)

    def known_arrival(self) -> Arrival:
        """How gradients come as far as it is known before one has come: complete on a DTensor's own axes."""
        if self.home.mesh is None:
            return Arrival(None, self.parameter.dtype)
        return Arrival(_filled(self._rule.source, self.home.target), self.parameter.dtype)

    def likely_arrival(self) -> Arrival:
        """As if a replicated parameter's gradient came Partial."""
        if self.home.mesh is None:
            return Arrival(None, self.parameter.dtype)
        guessed = tuple(Partial() if isinstance(p, Replicate) else p for p in self.home.target)
        return Arrival(_filled(self._rule.source, guessed), self.parameter.dtype)

    def contribution(self, arrival: Arrival) -> Contribution:
        """Raises ValueError that names the parameter where there is no way home."""
        way = self._known.get(arrival)
        if way is None:
            try:
                way = contribution(arrival, self.home, self._policy)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from None
            self._known[arrival] = way
        return way

    def arrival_text(self, arrival: Arrival) -> str:
        reduction = self.contribution(arrival).reduction
        placed = "a plain tensor" if arrival.placements is None else str(list(map(str, arrival.placements)))
        return f"{placed} ({reduction.text() if reduction is not None else 'complete'})"

    def staged(self, arrival: Arrival, way: Contribution, local: torch.Tensor) -> torch.Tensor:
        """This rank's contribution with all axes that are not pending where they belong."""
        if arrival.placements is None or way.staged == arrival.placements:
            return local
        assert self.home.mesh is not None and way.staged is not None
        return move_local(local, self.home.mesh, self.home.shape, arrival.placements, way.staged).wait()

    # What is there already

    def is_complete(self, gradient: torch.Tensor) -> bool:
        if is_marked_complete(gradient):
            return True
        if not isinstance(gradient, DTensor) or self._rule.source is not None:
            return False
        if tuple(gradient.placements) != self.home.target:
            return False
        return self.contribution(self.arrival_of(gradient)).reduction is None

    def set_aside(self) -> bool:
        """Keep a complete gradient from what comes now. Returns whether there is an older contribution instead."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.is_complete(gradient):
            self.carry, self.parameter.grad = gradient, None
            return False
        local = local_part(gradient)
        if self.carry is not None and (self._shown() is not local or self._version != local._version):
            self._follow_change(local)
        return True

    def _follow_change(self, local: torch.Tensor) -> None:
        """Somebody has changed the contribution that is shown, and means the complete gradient behind it, too."""
        if local.any():
            raise RuntimeError(
                f"{self.name}.grad was changed after a backward under no_sync() that came on top of a complete gradient: "
                "only this rank's contribution was there to be changed; change gradients when they are complete, or "
                "zero_grad() before no_sync()"
            )
        self.carry = None

    def settle(self) -> None:
        """After a backward without synchronization: show what was complete before, and let contributions go on
        accumulating in buckets."""
        gradient = self.parameter.grad
        if gradient is None or self.is_complete(gradient):
            if self.carry is not None and gradient is not None:
                self.carry.add_(gradient)
            if self.carry is not None:
                self.parameter.grad, self.carry = self.carry, None
            return
        self._move_to_bucket(gradient)
        if self.carry is not None:
            assert self.parameter.grad is not None
            local = local_part(self.parameter.grad)
            self._shown, self._version = weakref.ref(local), local._version

    def _move_to_bucket(self, gradient: torch.Tensor) -> None:
        arrival = self.arrival_of(gradient)
        slot = next((slot for slot in self.slots if slot.arrival == arrival), None)
        if slot is None or slot.contribution.staged != arrival.placements:
            return
        place, local = slot.bucket.place(slot), local_part(gradient)
        if place is not None and place.data_ptr() != local.data_ptr():
            place.copy_(local)
            self.parameter.grad = _wrapped(gradient, place) if isinstance(gradient, DTensor) else place

    def take_carry(self) -> None:
        """At the end of a step: what was complete before is shown again where nothing has been added to it."""
        if self.parameter.grad is None and self.carry is not None:
            self.parameter.grad = self.carry
        self.carry = None

    # How they get home

    def deliver_scattered(self, slot: Slot) -> None:
        """What the slot's bucket has reduced and scattered."""
        way = slot.contribution
        self.deliver(way, slot.bucket.scattered(slot, _region_shape(self.home, way.reduced)))

    def deliver(self, way: Contribution, local: torch.Tensor) -> None:
        """Make ``local``, reduced, the parameter's gradient, or add it to what is there."""
        home, parameter = self.home, self.parameter
        result = local
        if home.mesh is not None:
            if way.reduced != home.target:
                local = move_local(local, home.mesh, home.shape, way.reduced, home.target).wait()
            spec = make_spec(home.mesh, home.target, home.shape, _row_major(home.shape), local.dtype)
            result = make_dtensor(local, spec)
        for before in (parameter.grad, self.carry):
            if before is not None:
                same = not isinstance(before, DTensor) or tuple(before.placements) == home.target
                (local_part(before) if same else before).add_(local if same else result)
                parameter.grad, self.carry = before, None
                mark_complete(before)
                return
        mark_complete(result)
        parameter.grad = result


def local_part(gradient: torch.Tensor) -> torch.Tensor:
    local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return local.detach() if local.requires_grad else local


def _home(parameter: nn.Parameter, rule: GradientRule) -> Home:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Home(shape, None, ())
    target = tuple(Replicate() if p.is_partial() else p for p in parameter.placements)
    return Home(shape, parameter.device_mesh, _filled(rule.target, target))


def _filled(wanted: Sequence[Placement | None] | None, otherwise: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return otherwise if wanted is None else tuple(o if w is None else w for w, o in zip(wanted, otherwise))


def _wrapped(gradient: DTensor, local: torch.Tensor) -> DTensor:
    spec = make_spec(gradient.device_mesh, gradient.placements, gradient.shape, _row_major(gradient.shape), local.dtype)
    return make_dtensor(local, spec)


def _region_shape(home: Home, placements: Sequence[Placement]) -> tuple[int, ...]:
    if home.mesh is None:
        return home.shape
    coordinate = home.mesh.get_coordinate()
    assert coordinate is not None
    return local_region(home.shape, placements, tuple(home.mesh.shape), coordinate).local_shape


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    stride = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        stride[dim] = stride[dim + 1] * max(shape[dim + 1], 1)
    return tuple(stride)
