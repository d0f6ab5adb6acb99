"""``ReducedParameter``: how the gradients of one parameter arrive, and how they become complete."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import requested_by
from vescale.compat import ArrivalCount, DTensorSpec, local_of, make_dtensor, spec_of
from vescale.errors import GradientError
from vescale.gradients._arrival_hooks import ArrivalHooks
from vescale.gradients._bucket import Bucket
from vescale.gradients._bucket_memory import BucketSlot
from vescale.gradients._complete_gradient import added, gradient_spec, is_marked_complete, local_part, mark_complete
from vescale.gradients._reduction import Arrival, Contribution, Destination, Policy, contribution
from vescale.placements import move_local


@dataclass(frozen=True)
class GradientRule:
    """What is known in advance about the gradient of one parameter.

    Attributes:
        source: placements that each rank's gradient has, instead of those of the DTensor that arrives; None on an axis: the
            DTensor's own.
        target: placements of the complete gradient; None on an axis: the parameter's.
        on_captured: completes a gradient that ``torch.autograd.grad`` returns instead of accumulating it; without it, such
            a gradient stays this rank's contribution.
        reduce_dtype: the dtype of its communication; None: the reducer's.
    """

    source: tuple[Placement | None, ...] | None = None
    target: tuple[Placement | None, ...] | None = None
    on_captured: Callable[[torch.Tensor], torch.Tensor] | None = None
    reduce_dtype: torch.dtype | None = None


class ReducedParameter:
    """One parameter of a reducer.

    Attributes:
        index: its number, the same on every rank; -1 until the ranks have agreed on it.
        destination: where its gradient belongs.
        slots: its slots in buckets, one for each way in which its gradient arrives.
        plain_slot: the slot of gradients that are not converted first.
        previous: a complete gradient from before this backward, kept aside until the new one is added to it.
        complete_spec: of gradients that arrive complete, in the strides they keep; None: unknown.
        is_offered: whether the ranks have agreed on a slot, if one was known, although no gradient had arrived.
        hooks: while it is watched.
    """

    hooks: ArrivalHooks | None = None

    def __init__(self, name: str, parameter: torch.Tensor, rule: GradientRule, policy: Policy) -> None:
        self.index = -1
        self.name, self.parameter, self.rule = name, parameter, rule
        self.destination = _destination(parameter, rule)
        self.slots: list[BucketSlot[Bucket]] = []
        self.plain_slot: BucketSlot[Bucket] | None = None
        self.previous: torch.Tensor | None = None
        self.is_offered = False
        self._shown: Callable[[], torch.Tensor | None] = lambda: None  # a contribution, while there is a previous one
        self._version = 0
        self._policy = policy if rule.reduce_dtype is None else replace(policy, reduce_dtype=rule.reduce_dtype)
        self._contributions: dict[Arrival, Contribution] = {}
        self._usual: Arrival | None = None  # of the last gradient; the next one most likely arrives in the same way
        self._usual_spec: DTensorSpec | None = None  # of that gradient, if it was a DTensor
        self._spec: DTensorSpec | None = None
        self.complete_spec: DTensorSpec | None = None

    def notify(self, is_notified: bool) -> None:
        """Set whether a hook announces each gradient, if the parameter is watched."""
        if self.hooks is not None:
            self.hooks.notify(is_notified)

    def count(self, arrivals: ArrivalCount | None, index: int = 0) -> None:
        """Have the hook count gradients as those of a slot, where none of them may be complete; None: no longer."""
        if self.hooks is not None:
            self.hooks.count(arrivals if self.complete_spec is None else None, index)

    def describe(self) -> str:
        """A text for ranks to compare."""
        placed = list(map(str, self.destination.target)) if self.destination.mesh is not None else "plain"
        frozen = "" if self.parameter.requires_grad else ", frozen"
        return f"{self.destination.shape} {self.parameter.dtype} {placed}{frozen}"

    def new_slot(self, arrival: Arrival, num_expected: int) -> BucketSlot[Bucket]:
        """A slot that is not among :attr:`slots` yet."""
        found = self.contribution(arrival)
        if self.destination.mesh is None:
            parameter = self.parameter if arrival.dtype == self.parameter.dtype else None
            return BucketSlot(self.name, self, arrival, found, num_expected, parameter)
        spec = self._usual_spec if self._usual == arrival else None
        is_converted = found.staged != arrival.placements or found.reduced != self.destination.target
        if spec is None or is_converted or found.pieces is not None:
            return BucketSlot(self.name, self, arrival, found, num_expected)
        result_spec = self._spec_of(self.destination.target, arrival.dtype)
        return BucketSlot(self.name, self, arrival, found, num_expected, self.parameter, spec, result_spec)

    def add_slot(self, slot: BucketSlot[Bucket]) -> None:
        self.slots.append(slot)
        self._usual = None
        if slot.parameter is not None and self.plain_slot is None:
            self.plain_slot = slot

    def drop_slots(self) -> None:
        """Called when all slots are assigned anew."""
        self.slots.clear()
        self.plain_slot, self.is_offered = None, False
        self.complete_spec = self._usual = None

    # How gradients arrive

    def arrival_of(self, gradient: torch.Tensor) -> Arrival:
        spec = spec_of(gradient) if type(gradient) is DTensor else None
        usual = self._usual
        if usual is not None and spec is not None and spec is self._usual_spec:
            return usual
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"{self.name}.grad is a {gradient.layout} tensor, which cannot be reduced; make it dense "
                "(nn.Embedding(sparse=False))"
            )
        placements = self._placements_of(gradient)
        if usual is None or usual.placements != placements or usual.dtype != gradient.dtype:
            arrival = Arrival(placements, gradient.dtype)
            self._usual = usual = next((slot.arrival for slot in self.slots if slot.arrival == arrival), arrival)
        self._usual_spec = spec
        return usual

    def _placements_of(self, gradient: torch.Tensor) -> tuple[Placement, ...] | None:
        if self.destination.mesh is None:
            return None
        if isinstance(gradient, DTensor):
            placements = tuple(gradient.placements)
        else:  # a plain gradient of a DTensor is the same on every rank
            placements = (Replicate(),) * len(self.destination.target)
        return _filled(self.rule.source, placements)

    def known_arrival(self) -> Arrival:
        """The arrival as far as it is known before a gradient has arrived: complete on a DTensor's own axes."""
        if self.destination.mesh is None:
            return Arrival(None, self.parameter.dtype)
        return Arrival(_filled(self.rule.source, self.destination.target), self.parameter.dtype)

    def likely_arrival(self) -> Arrival:
        """The arrival if the gradient is Partial wherever the parameter is replicated."""
        if self.destination.mesh is None:
            return Arrival(None, self.parameter.dtype)
        guessed = tuple(Partial() if isinstance(p, Replicate) else p for p in self.destination.target)
        return Arrival(_filled(self.rule.source, guessed), self.parameter.dtype)

    def contribution(self, arrival: Arrival) -> Contribution:
        """Raises ValueError that names the parameter, as :func:`contribution` does."""
        found = self._contributions.get(arrival)
        if found is None:
            try:
                found = contribution(arrival, self.destination, self._policy)
            except ValueError as error:
                raise GradientError(f"{self.name}: {error}") from None
            self._contributions[arrival] = found
        return found

    def arrival_text(self, arrival: Arrival) -> str:
        reduction = self.contribution(arrival).reduction
        placed = "a plain tensor" if arrival.placements is None else str(list(map(str, arrival.placements)))
        return f"{placed} ({reduction.text() if reduction is not None else 'complete'})"

    def staged(self, arrival: Arrival, staged: tuple[Placement, ...] | None, local: torch.Tensor) -> torch.Tensor:
        """``local`` with the axes that are not pending brought to the target; may communicate."""
        if arrival.placements is None or staged == arrival.placements:
            return local
        destination = self.destination
        assert destination.mesh is not None and staged is not None
        return move_local(local, destination.mesh, destination.shape, arrival.placements, staged).wait()

    # Gradients that are there before a backward, or stay after one

    def is_complete(self, gradient: torch.Tensor) -> bool:
        if is_marked_complete(gradient):
            return True
        if not isinstance(gradient, DTensor) or self.rule.source is not None:
            return False
        if tuple(gradient.placements) != self.destination.target:
            return False
        return self.contribution(self.arrival_of(gradient)).reduction is None

    def remember_complete(self, gradient: torch.Tensor) -> None:
        """A gradient with this spec was complete as it arrived, unless it was brought elsewhere or came in other strides."""
        now = self.parameter.grad
        if type(gradient) is DTensor and isinstance(now, DTensor) and spec_of(gradient) == spec_of(now):
            self.complete_spec = spec_of(gradient)
            self.count(None)

    def is_complete_as_before(self) -> bool:
        """Whether the gradient that has been accumulated is complete, like one with the same spec before. It stays."""
        gradient = self.parameter.grad
        if self.complete_spec is None or self.previous is not None or type(gradient) is not DTensor:
            return False
        if spec_of(gradient) is not self.complete_spec or type(local_of(gradient)) is not torch.Tensor:
            return False
        if gradient.requires_grad:  # of create_graph=True, which is detached
            return False
        mark_complete(gradient)
        return True

    def set_aside(self) -> bool:
        """Keep a complete gradient apart from what arrives now. Returns whether there is an older contribution instead."""
        gradient = self.parameter.grad
        assert gradient is not None
        if self.is_complete(gradient):
            self.previous, self.parameter.grad = gradient, None
            return False
        local = local_part(gradient)
        if self.previous is not None and (self._shown() is not local or self._version != local._version):
            self._check_change(local)
        return True

    def _check_change(self, local: torch.Tensor) -> None:
        """The user has changed the contribution that ``.grad`` shows, and means the complete gradient, too."""
        if local.any():
            raise GradientError(
                f"{self.name}.grad was changed after a backward under no_sync() that added to a complete gradient: "
                "only this rank's contribution was changed; change gradients when they are complete, or call "
                "zero_grad() before no_sync()"
            )
        self.previous = None

    def settle(self) -> None:
        """After a backward without synchronization: restore the complete gradient, and let contributions accumulate in
        their bucket."""
        gradient = self.parameter.grad
        if gradient is None or self.is_complete(gradient):
            if self.previous is not None and gradient is not None:
                self.previous.add_(gradient)
            if self.previous is not None:
                self.parameter.grad, self.previous = self.previous, None
            return
        self._move_to_bucket(gradient)
        if self.previous is not None:
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
            if isinstance(gradient, DTensor):
                place = make_dtensor(place, self._spec_of(gradient.placements, place.dtype))
            self.parameter.grad = place

    def restore_previous(self) -> None:
        """At the end of a step: show the gradient that was complete before, if nothing was added to it."""
        if self.parameter.grad is None and self.previous is not None:
            self.parameter.grad = self.previous
        self.previous = None

    # How gradients become complete

    def deliver(self, contribution: Contribution, local: torch.Tensor) -> None:
        """Make the reduced ``local`` the parameter's gradient, or add it to the gradient that is there."""
        destination, parameter = self.destination, self.parameter
        spec = None
        if destination.mesh is not None:
            target = destination.target
            if contribution.reduced != target:
                local = move_local(local, destination.mesh, destination.shape, contribution.reduced, target).wait()
            spec = self._spec_of(target, local.dtype)
        before = parameter.grad if parameter.grad is not None else self.previous
        parameter.grad = complete = added(before, local, spec)
        self.previous = None
        mark_complete(complete)

    def _spec_of(self, placements: Sequence[Placement], dtype: torch.dtype) -> DTensorSpec:
        """The spec of a gradient; the complete gradient's is kept."""
        assert isinstance(self.parameter, DTensor)
        if tuple(placements) != self.destination.target:
            return gradient_spec(self.parameter, placements, dtype)
        kept = self._spec
        if kept is None or kept.tensor_meta is None or kept.tensor_meta.dtype != dtype:
            self._spec = kept = gradient_spec(self.parameter, placements, dtype)
        return kept


def _destination(parameter: torch.Tensor, rule: GradientRule) -> Destination:
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return Destination(shape, None, ())
    target = tuple(Replicate() if p.is_partial() else p for p in parameter.placements)
    return Destination(shape, parameter.device_mesh, _filled(rule.target, target))


def _filled(wanted: Sequence[Placement | None] | None, otherwise: tuple[Placement, ...]) -> tuple[Placement, ...]:
    return otherwise if wanted is None else tuple(o if w is None else w for w, o in zip(wanted, otherwise))


# ``LocalContribution``: what a rank's gradient of one parameter contributes to a sum over data-parallel axes.


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
