"""``GradientReducer``: gradients of any DTensor model, or of local modules, reduced in buckets while backward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from vescale.comm import DEFAULT_BUCKET_BYTES, BucketBytes, Consensus, bucket_limits, link_of
from vescale.compat import (
    AsyncCollectiveTensor,
    at_end_of_backward,
    current_autograd_node,
    local_of,
    make_dtensor,
    make_spec,
    no_torch_function,
)
from vescale.placements import local_region, move_local
from vescale.runtime._gradients._axes import unite
from vescale.runtime._gradients._bucket import Bucket, CommHook, Slot, is_untouched
from vescale.runtime._gradients._reduction import Arrival, Contribution, Home, Policy, contribution
from vescale.runtime._gradients._schedule import (
    Observed,
    Schedule,
    agree_on_arrivals,
    agree_on_parameters,
    make_buckets,
)

__all__ = ["GradientReducer", "GradientRule"]

# Set on a gradient that a reducer has completed: what is accumulated on top of it is reduced by itself.
_COMPLETE = "_vescale_complete"
# Set on a parameter that has a reducer.
_OWNED = "_vescale_reduced"


@dataclass(frozen=True)
class GradientRule:
    """What is known of one parameter's gradient beforehand.

    Attributes:
        source: what each rank's gradient is, whatever it says of itself; None on an axis: what it says.
        target: where it goes; None on an axis: as the parameter lies there.
    """

    source: tuple[Placement | None, ...] | None = None
    target: tuple[Placement | None, ...] | None = None


@dataclass
class _Entry:
    """One parameter: where its gradient belongs, and what is underway.

    ``carry`` is a complete gradient that was there before this backward, kept aside until the new one is added to it.
    """

    index: int
    name: str
    parameter: nn.Parameter
    home: Home
    rule: GradientRule
    known: dict[Arrival, Contribution] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    usual: Arrival | None = None  # how the last gradient came: the next one most likely comes the same way
    carry: torch.Tensor | None = None


class GradientReducer:
    """Reduces gradients over all axes they are Partial on, several in one collective, overlapped with backward.

    For stock DTensor models, for plain modules that every rank feeds its own part of the batch, and for mixtures.

    ========================  =========================================================================================
    moment                    ``parameter.grad``
    ========================  =========================================================================================
    in backward               the gradient leaves for its bucket; a full bucket is reduced while backward goes on
    ``backward()`` returned   complete: a view of its bucket, placed as the parameter; None if no rank used the parameter
    under :meth:`no_sync`     this rank's contribution: plain, or still Partial; further backwards add to it in the bucket
    :meth:`finish`            as after backward; for ranks whose backward reached no parameter
    ========================  =========================================================================================

    What is reduced: of a DTensor gradient the axes on which it is Partial and its parameter is not, and the axes of
    ``mesh`` that its own mesh does not have; of a plain gradient all axes of ``mesh``. The axes are fused into one group;
    where no mesh is known of which both are axes, there is one collective for each. Communication: one collective a
    bucket, an all-reduce, or where the parameter is sharded on one of the axes a reduce-scatter and an all-reduce of the
    piece if that is faster by the ring model.

    The buckets are learned in the first step, whose gradients are reduced at its end: gradients with the same axes, op,
    dtype and destination, in the order in which they get ready on the first rank. All ranks compare what they have
    learned, through the store, and launch the same buckets in the same order ever after; a parameter that a rank does not
    use contributes zeros. Later arrivals (another part of the model is trained, another placement) are learned the same
    way at the end of their backward.

    Args:
        module: its parameters that require gradients now, except on meshes that this rank is not part of.
        mesh: over which plain gradients are reduced, and what ``op`` is about.
        bucket_bytes: the largest bucket (the first is at most 1 MiB); a list: of each in turn; ``"auto"``: growing up to
            the size at which latency no longer counts.
        reduce_dtype: communicate in this dtype and cast back; None: each gradient's own.
        op: what ranks' gradients along the axes of ``mesh`` mean together. None: what they say, a DTensor by its
            Partial, and the average of plain ones. Other axes: what they say.
        timeout: how long comparisons wait for other ranks; None: as long as collectives.

    Raises:
        GradientMismatchError: on every rank, when ranks bring different modules or settings; later, in ``backward()``,
            when they bring the gradient of one parameter in different ways.
        ConsensusError: ranks that others wait for in vain.
        ValueError: a mesh that overlaps a parameter's without both being axes of one mesh; an unknown op; sizes that are
            none; a parameter that has a reducer already.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        bucket_bytes: BucketBytes = DEFAULT_BUCKET_BYTES,
        reduce_dtype: torch.dtype | None = None,
        op: Literal["avg", "sum"] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if op not in (None, "avg", "sum"):
            raise ValueError(f"GradientReducer: op={op!r}; use 'avg', 'sum', or None for what the gradients say")
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"GradientReducer over {mesh}, which this rank is not part of; make it on the mesh's ranks"
            )
        self._mesh = mesh
        self._bucket_bytes: BucketBytes = bucket_bytes
        self._policy = Policy(mesh, op, reduce_dtype)
        self._schedule = Schedule()
        self._hook: CommHook | None = None
        self._syncs = True
        self.around_no_sync: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """What else :meth:`no_sync` is to enter."""
        self._in_backward = False
        self._num_superseded = 0
        self._arrived = False
        self._has_reduced = False
        self._has_learned = False
        self._unplaced: dict[tuple[int, Arrival], tuple[torch.Tensor, int]] = {}
        self._entries: list[_Entry] = []
        self._handles: list[Any] = [module.register_forward_pre_hook(lambda *_: self.recover())]
        bucket_limits(bucket_bytes, 1, link_of(mesh.device_type))  # refuses what is no size
        parameters = [(name, p, GradientRule()) for name, p in module.named_parameters() if p.requires_grad]
        entries = _entries(parameters, 0)
        self._consensus = Consensus(_ranks(entries, mesh), "GradientReducer", timeout)
        self._adopt(entries, f"op={op} bucket_bytes={bucket_bytes} reduce_dtype={reduce_dtype}")

    def add(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> None:
        """Reduce the gradients of more parameters (unfrozen since), on meshes of those known; the same on every rank.

        Raises GradientMismatchError and ValueError as the constructor does.
        """
        self._adopt(_entries(parameters, len(self._entries)), "more parameters")

    def _adopt(self, entries: list[_Entry], what: str) -> None:
        agree_on_parameters([_described(entry) for entry in entries], what, self._consensus)
        self._entries += entries
        for entry in entries:
            setattr(entry.parameter, _OWNED, id(entry.parameter))
            self._handles += [
                entry.parameter.register_hook(lambda grad: self._begin()),
                entry.parameter.register_post_accumulate_grad_hook(lambda _, entry=entry: self._take(entry)),
            ]

    # What users see

    @property
    def num_buckets(self) -> int:
        """Buckets, and so collectives, of a step. Before the first step, as if every replicated parameter's gradient
        came Partial."""
        return len(self.buckets)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The schedule, in the order in which it is carried out: for reports and tests."""
        return self._schedule.buckets or make_buckets(self._guess(), self._bucket_bytes, self._mesh.device_type)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate this rank's gradients; the first one outside reduces all of it."""
        before, self._syncs = self._syncs, False
        try:
            with self.around_no_sync():
                yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """Complete the gradients of this step on a rank whose backward reached no parameter, and those accumulated under
        :meth:`no_sync`; nothing where a backward has done so since the last call.

        Call it once a step, on every rank, where some rank may have had nothing to do backward for.
        """
        if not self._has_reduced:
            with torch.no_grad(), no_torch_function():
                self._prepare()
                self._reduce()
        self._has_reduced = False

    def remove(self) -> None:
        """Take the reducer off the module: gradients are each rank's own again."""
        for handle in self._handles:
            handle.remove()
        for entry in self._entries:
            delattr(entry.parameter, _OWNED)
        self._handles.clear()
        self._entries.clear()
        self._schedule = Schedule()

    def register_comm_hook(self, hook: CommHook) -> None:
        """Replace the all-reduces of buckets, to compress them for example; see :class:`GradientBucket`.

        The hook returns the reduced tensor, or a ``Pending`` of it, in any dtype, with the buffer's number of elements.
        It must start the same collectives on every rank.
        """
        self._hook = hook

    def describe(self) -> list[str]:
        """One line for each bucket: gradients, bytes, axes, op, and the bytes that a rank sends."""
        return [
            f"bucket {b.index}: {len(b.slots)} gradients, {b.num_bytes} bytes, {b.reduction.text()}, "
            f"{b.num_collectives} collectives of {b.moved_bytes} bytes"
            for b in self.buckets
        ]

    # Backward

    def begin(self) -> None:
        """Inside a backward: gradients will be put into ``.grad`` by others than autograd, who have arranged for doing so at
        its end. This reducer's work then comes after theirs."""
        if self._in_backward:
            self._num_superseded += 1
            at_end_of_backward(self._end)
        else:
            self._begin()

    def _begin(self) -> None:
        """The first gradient of a backward has been computed, and none is accumulated yet."""
        if self._in_backward:
            return
        self._in_backward = True
        self._arrived = False
        at_end_of_backward(self._end)
        with torch.no_grad(), no_torch_function():
            self._prepare()

    def _prepare(self) -> None:
        """Put complete gradients aside: what comes now is each rank's own contribution."""
        for entry in self._entries:
            gradient = entry.parameter.grad
            if gradient is None:
                entry.carry = None  # zero_grad() is about what is hidden, too
            elif self._is_complete(entry, gradient):
                entry.carry, entry.parameter.grad = gradient, None

    def _is_complete(self, entry: _Entry, gradient: torch.Tensor) -> bool:
        if getattr(gradient, _COMPLETE, False):
            return True
        if not isinstance(gradient, DTensor) or entry.rule.source is not None:
            return False
        return self._contribution(entry, _arrival(entry, gradient)).reduction is None

    def _take(self, entry: _Entry) -> None:
        """A gradient has been accumulated."""
        self._arrived = True
        if not self._syncs:
            return
        if entry.home.mesh is None and not torch.is_grad_enabled():
            self._place(entry)
            return
        with torch.no_grad(), no_torch_function():
            self._place(entry)

    def _place(self, entry: _Entry) -> None:
        """Hand this rank's contribution over to its bucket."""
        gradient = entry.parameter.grad
        assert gradient is not None
        entry.parameter.grad = None
        arrival = _arrival(entry, gradient)
        local = _local(gradient)
        for slot in entry.slots:
            assert slot.bucket is not None
            if (slot.arrival is arrival or slot.arrival == arrival) and not slot.bucket.is_launched:
                slot.bucket.arrive(slot, self._staged(entry, arrival, slot.contribution, local))
                if slot.bucket.is_full:
                    self._launch_full()
                return
        way = self._contribution(entry, arrival)
        local = self._staged(entry, arrival, way, local)
        if way.reduction is None:
            self._deliver(entry, way, local.detach())
            return
        known = self._unplaced.get((entry.index, arrival))
        if known is None:
            self._unplaced[entry.index, arrival] = (local, 1)
        else:
            self._unplaced[entry.index, arrival] = (known[0].add_(local), known[1] + 1)

    def _launch_full(self) -> None:
        """Buckets are launched in the order of the schedule, whatever order they get full in."""
        schedule = self._schedule
        while schedule.num_launched < len(schedule.buckets) and schedule.buckets[schedule.num_launched].is_full:
            schedule.buckets[schedule.num_launched].launch(self._hook)
            schedule.num_launched += 1

    def _end(self) -> None:
        """The outermost backward has ended."""
        if self._num_superseded:
            self._num_superseded -= 1
            return
        self._in_backward = False
        with torch.no_grad(), no_torch_function():
            if self._arrived and self._syncs:
                self._reduce()
                self._has_reduced = True
                return
            if self._arrived:
                self._has_reduced = False  # there is something to reduce again
            for entry in self._entries:
                self._settle(entry)

    def _settle(self, entry: _Entry) -> None:
        """Without synchronization: show what was complete before, and let contributions go on accumulating in buckets."""
        gradient = entry.parameter.grad
        if gradient is None or self._is_complete(entry, gradient):
            if entry.carry is not None and gradient is not None:
                entry.carry.add_(gradient)
            if entry.carry is not None:
                entry.parameter.grad, entry.carry = entry.carry, None
            return
        arrival = _arrival(entry, gradient)
        slot = next((slot for slot in entry.slots if slot.arrival == arrival), None)
        if slot is None or slot.contribution.staged != arrival.placements:
            return
        assert slot.bucket is not None
        place, local = slot.bucket.place(slot), _local(gradient)
        if place is None or place.data_ptr() == local.data_ptr():
            return
        place.copy_(local)
        entry.parameter.grad = _wrapped(gradient, place) if isinstance(gradient, DTensor) else place

    def recover(self) -> None:
        """A forward begins outside of any backward: if one seems to be running, it ended by an exception."""
        if self._in_backward and current_autograd_node() is None:
            self._in_backward, self._num_superseded = False, 0
            for bucket in self._schedule.buckets[: self._schedule.num_launched]:
                bucket.advance()
                bucket.finish()
            self._finish_step()

    # The end of a step

    def _reduce(self) -> None:
        """Launch what is left, learn what is new, and complete all gradients."""
        schedule = self._schedule
        for entry in self._entries:  # accumulated under no_sync, and not touched by the last backward
            gradient = entry.parameter.grad
            if gradient is not None and not self._is_complete(entry, gradient):
                self._place(entry)
        for bucket in schedule.buckets[schedule.num_launched :]:
            bucket.launch(self._hook)
        if self._unplaced or not self._has_learned:
            self._has_learned = True
            for bucket in self._learn():
                bucket.launch(self._hook)
        schedule.num_launched = len(schedule.buckets)
        launched = list(schedule.buckets)
        here = {bucket.index: [slot for slot in bucket.slots if slot.num_arrived] for bucket in launched}
        for bucket in launched:
            bucket.advance()
        for bucket in launched:
            bucket.finish()
        untouched = _untouched(launched)
        for bucket in launched:
            for slot in bucket.slots:
                if slot in here[bucket.index] or slot not in untouched:
                    self._deliver_slot(slot)
        self._finish_step()

    def _finish_step(self) -> None:
        for bucket in self._schedule.buckets:
            bucket.close()
        self._schedule.num_launched = 0
        self._unplaced.clear()
        for entry in self._entries:
            if entry.parameter.grad is None and entry.carry is not None:
                entry.parameter.grad = entry.carry
            entry.carry = None

    def _learn(self) -> list[Bucket]:
        """Agree on places for gradients that have none, and give them these."""
        observed = [Observed(index, arrival, count) for (index, arrival), (_, count) in self._unplaced.items()]
        agreed = agree_on_arrivals(
            observed, lambda index: self._entries[index].name, self._arrival_text, self._consensus
        )
        slots = []
        for item in agreed + self._not_seen({item.index for item in agreed}):
            entry = self._entries[item.index]
            way = self._contribution(entry, item.arrival)
            if way.reduction is not None:
                slots.append(Slot(entry.name, entry, item.arrival, way, item.count))
        new = self._schedule.extend(slots, self._bucket_bytes, self._mesh.device_type)
        for slot in slots:
            slot.entry.slots.append(slot)
            found = self._unplaced.get((slot.entry.index, slot.arrival))
            if found is not None:
                assert slot.bucket is not None
                slot.bucket.arrive(slot, found[0])
        return new

    def _not_seen(self, seen: set[int]) -> list[Observed]:
        """Parameters that no rank has used yet, if it is known how their gradients will come: a rank may use one that
        others never do. DTensors' own axes tell nothing; there all ranks use what any rank uses."""
        found = []
        for entry in reversed(self._entries):
            if entry.index not in seen and not entry.slots:
                placements = None if entry.home.mesh is None else entry.home.target
                found.append(Observed(entry.index, Arrival(placements, entry.parameter.dtype), 1))
        return found

    def _arrival_text(self, observed: Observed) -> str:
        arrival = observed.arrival
        way = self._contribution(self._entries[observed.index], arrival)
        reduction = way.reduction.text() if way.reduction is not None else "complete"
        placed = "a plain tensor" if arrival.placements is None else str(list(map(str, arrival.placements)))
        return f"{placed} ({reduction})"

    def _deliver_slot(self, slot: Slot) -> None:
        entry: _Entry = slot.entry
        assert slot.bucket is not None
        shape = _region_shape(entry.home, slot.contribution.reduced)
        self._deliver(entry, slot.contribution, slot.bucket.result(slot, shape))

    def _deliver(self, entry: _Entry, way: Contribution, local: torch.Tensor) -> None:
        """Make ``local``, reduced, the parameter's gradient, or add it to what is there."""
        home = entry.home
        result = local
        if home.mesh is not None:
            if way.reduced != home.target:
                local = move_local(local, home.mesh, home.shape, way.reduced, home.target).wait()
            spec = make_spec(home.mesh, home.target, home.shape, _row_major(home.shape), local.dtype)
            result = make_dtensor(local, spec)
        for before in (entry.parameter.grad, entry.carry):
            if before is not None:
                same = not isinstance(before, DTensor) or tuple(before.placements) == home.target
                (_local(before) if same else before).add_(local if same else result)
                entry.parameter.grad, entry.carry = before, None
                setattr(before, _COMPLETE, True)
                return
        setattr(result, _COMPLETE, True)
        entry.parameter.grad = result

    # How gradients come

    def _contribution(self, entry: _Entry, arrival: Arrival) -> Contribution:
        way = entry.known.get(arrival)
        if way is None:
            try:
                way = contribution(arrival, entry.home, self._policy)
            except ValueError as error:
                raise ValueError(f"{entry.name}: {error}") from None
            entry.known[arrival] = way
        return way

    def _staged(self, entry: _Entry, arrival: Arrival, way: Contribution, local: torch.Tensor) -> torch.Tensor:
        """This rank's contribution with all axes that are not pending where they belong."""
        if arrival.placements is None or way.staged == arrival.placements:
            return local
        assert entry.home.mesh is not None and way.staged is not None
        return move_local(local, entry.home.mesh, entry.home.shape, arrival.placements, way.staged).wait()

    def _guess(self) -> list[Slot]:
        """What the first step is likely to bring: every replicated parameter's gradient Partial."""
        slots = []
        for entry in reversed(self._entries):
            placements = None
            if entry.home.mesh is not None:
                guessed = [Partial() if isinstance(p, Replicate) else p for p in entry.home.target]
                source = entry.rule.source or (None,) * len(guessed)
                placements = tuple(g if s is None else s for g, s in zip(guessed, source))
            arrival = Arrival(placements, entry.parameter.dtype)
            way = self._contribution(entry, arrival)
            if way.reduction is not None:
                slots.append(Slot(entry.name, entry, arrival, way, 1))
        return slots


def _entries(parameters: Sequence[tuple[str, nn.Parameter, GradientRule]], first: int) -> list[_Entry]:
    entries: list[_Entry] = []
    for name, parameter, rule in parameters:
        if getattr(parameter, _OWNED, None) == id(parameter):  # a copy carries its original's
            raise ValueError(
                f"{name} has a GradientReducer already, so that its gradient would be reduced twice; use that one "
                "(gradient_reducer(model) of a parallelized model), or remove() it"
            )
        home = Home(tuple(parameter.shape), None, ())
        if isinstance(parameter, DTensor):
            own = parameter.device_mesh
            if own.get_coordinate() is None:
                continue
            target = tuple(Replicate() if p.is_partial() else p for p in parameter.placements)
            if rule.target is not None:
                target = tuple(t if p is None else p for p, t in zip(rule.target, target))
            home = Home(tuple(parameter.shape), own, target)
        entries.append(_Entry(first + len(entries), name, parameter, home, rule))
    return entries


def _described(entry: _Entry) -> str:
    placed = list(map(str, entry.home.target)) if entry.home.mesh is not None else "plain"
    return f"{entry.name} {entry.home.shape} {entry.parameter.dtype} {placed}"


def _ranks(entries: Sequence[_Entry], mesh: DeviceMesh) -> tuple[int, ...]:
    """Everyone whose collectives must match this rank's: the ranks of a mesh that all parameters' meshes are axes of, as
    far as such a mesh is known."""
    home = mesh
    for own in {entry.home.mesh for entry in entries} - {None}:
        assert own is not None
        union = unite(own, home)
        if union is not None and union.home.size() > home.size():
            home = union.home
    return tuple(sorted(home.mesh.flatten().tolist()))


def _arrival(entry: _Entry, gradient: torch.Tensor) -> Arrival:
    placements = _placements(entry, gradient)
    usual = entry.usual
    if usual is None or usual.placements != placements or usual.dtype != gradient.dtype:
        entry.usual = usual = Arrival(placements, gradient.dtype)
    return usual


def _placements(entry: _Entry, gradient: torch.Tensor) -> tuple[Placement, ...] | None:
    if entry.home.mesh is None:
        return None
    if isinstance(gradient, DTensor):
        placements = tuple(gradient.placements)
    else:  # of one that is no DTensor every rank has the same
        placements = (Replicate(),) * len(entry.home.target)
    if entry.rule.source is not None:
        placements = tuple(f if s is None else s for f, s in zip(placements, entry.rule.source))
    return placements


def _local(gradient: torch.Tensor) -> torch.Tensor:
    local = local_of(gradient) if isinstance(gradient, DTensor) else gradient
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    return local.detach() if local.requires_grad else local


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


def _untouched(buckets: Sequence[Bucket]) -> set[Slot]:
    """The slots that no rank has contributed to. The device is asked once, and only if this rank left a slot out."""
    slots, flags = [], []
    for bucket in buckets:
        for slot in bucket.slots:
            if not slot.num_arrived:
                mark = bucket.mark(slot)
                slots.append(slot)
                flags.append(is_untouched(mark, bucket.op) if mark.numel() else mark.new_ones(1, dtype=torch.bool))
    if not flags:
        return set()
    return {slot for slot, flag in zip(slots, torch.cat(flags).tolist()) if flag}
