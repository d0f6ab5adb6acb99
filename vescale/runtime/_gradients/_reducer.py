"""``GradientReducer``: gradients of any DTensor model, or of local modules, reduced in buckets while backward runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import DEFAULT_BUCKET_BYTES, BucketBytes, Consensus
from vescale.compat import in_backward, no_torch_function
from vescale.runtime._gradients._axes import unite
from vescale.runtime._gradients._bucket import Bucket
from vescale.runtime._gradients._comm_hook import CommHook
from vescale.runtime._gradients._entry import Entry, GradientRule, local_part
from vescale.runtime._gradients._members import Members
from vescale.runtime._gradients._reduction import Arrival, Policy
from vescale.runtime._gradients._running import RunningBackward
from vescale.runtime._gradients._schedule import (
    Observed,
    Schedule,
    agree_on_arrivals,
    agree_on_parameters,
    make_buckets,
)
from vescale.runtime._gradients._settings import check_settings
from vescale.runtime._gradients._slot import Slot

__all__ = ["GradientReducer"]


class GradientReducer:
    """Reduces gradients over all axes they are Partial on, several in one collective, overlapped with backward.

    For stock DTensor models, for plain modules that every rank feeds its own part of the batch, and for mixtures.

    ========================  =========================================================================================
    moment                    ``parameter.grad``
    ========================  =========================================================================================
    in backward               the gradient leaves for its bucket, a small one of a plain parameter once all of the bucket
                              have come; a full bucket is reduced while backward goes on
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

    Parameters may be frozen and unfrozen, replaced and added later, in the same way on every rank: what has changed is seen
    at the module's forward, at the beginning of a backward, and in :meth:`finish`.

    Args:
        module: its parameters, except on meshes that this rank is not part of.
        mesh: over which plain gradients are reduced, and what ``op`` is about.
        bucket_bytes: the largest bucket (the first is about 1 MiB); a list: of each in turn; ``"auto"``: growing up to
            the size at which latency no longer counts.
        reduce_dtype: communicate in this dtype and cast back; None: each gradient's own.
        op: what ranks' gradients along the axes of ``mesh`` mean together. None: what they say, a DTensor by its
            Partial, and the average of plain ones. Other axes: what they say.
        timeout: how long comparisons wait for other ranks; None: as long as collectives.

    Raises:
        GradientMismatchError: on every rank, when ranks bring different modules or settings; later, in ``backward()``,
            when they bring the gradient of one parameter in different ways.
        ConsensusError: ranks that others wait for in vain.
        TypeError: no module, or no mesh.
        ValueError: a mesh that overlaps a parameter's without both being axes of one mesh; an unknown op or dtype; sizes
            that are none; a parameter that has a reducer already, or whose gradient ``fully_shard``, DDP or
            ``parallelize`` reduces.
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
        check_settings(module, mesh, bucket_bytes, reduce_dtype, op)
        self._mesh = mesh
        self._bucket_bytes: BucketBytes = bucket_bytes
        self._policy = Policy(mesh, op, reduce_dtype)
        self._schedule = Schedule()
        self._hook: CommHook | None = None
        self._syncs = True
        self.around_no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """What else :meth:`no_sync` is to enter."""
        self._backward = RunningBackward(self._end)
        self._is_begun = False  # a backward, that has not come to its end
        self._is_synced = False
        self._arrived = False
        self._has_looked = False  # whether changes of the module have been seen, before the backward to come
        self._has_older = False  # contributions of earlier backwards that have not left for their buckets
        self._has_carries = False  # complete gradients that are kept aside
        self._has_reduced = False
        self._unplaced: dict[tuple[Entry, Arrival], tuple[torch.Tensor, int]] = {}
        self._members = Members(module, self._policy, self._begin, self._take, self._backward.gate)
        self._entries: list[Entry] = []
        self._new: list[Entry] = []  # watched, and not agreed on by the ranks yet
        self._gone: list[Entry] = []  # no longer there, and not agreed on either
        self._unoffered: list[Entry] = []  # of the entries; may have got places since
        self._is_outdated = False  # the schedule has places for what is gone
        new, _ = self._members.changes()
        self._consensus = Consensus(_ranks(new, mesh), "GradientReducer", timeout)
        self._agree(new, f"op={op} bucket_bytes={bucket_bytes} reduce_dtype={reduce_dtype}")
        self._members.watch(new)
        self._handle = module.register_forward_pre_hook(lambda *_: self.recover())

    def add(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> None:
        """Reduce the gradients of more parameters, on meshes of those known; the same on every rank.

        Raises GradientMismatchError and ValueError as the constructor does.
        """
        new = self._members.entries_of(parameters)
        self._agree(new, "more parameters")
        self._members.watch(new)

    def _agree(self, new: Sequence[Entry], what: str) -> None:
        """Compare new parameters with those of other ranks, and number them."""
        agree_on_parameters([entry.describe() for entry in new], what, self._consensus)
        self._entries += new
        self._unoffered = [entry for entry in self._entries if not entry.is_offered]
        for index, entry in enumerate(self._entries):
            entry.index = index

    # What users see

    @property
    def num_buckets(self) -> int:
        """Buckets, and so collectives, of a step. Before the first step, as if every replicated parameter's gradient
        came Partial."""
        return len(self.buckets)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The schedule, in the order in which it is carried out: for reports and tests."""
        if self._schedule.buckets:
            return self._schedule.buckets
        trained = [entry for entry in reversed(self._entries) if entry.parameter.requires_grad]
        guessed = self._slots([(entry, entry.likely_arrival(), 1) for entry in trained])
        return make_buckets(guessed, self._bucket_bytes, self._mesh.device_type)

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

        Call it once in every step, on every rank, where some rank may have had nothing to do backward for: called in some
        steps only, it is taken for the end of the step before, does nothing, and others wait for this rank in vain.
        """
        with torch.no_grad(), no_torch_function():
            self._break_off()
            if not self._has_reduced:
                self._prepare()
                self._reduce()
        self._has_reduced = False

    def remove(self) -> None:
        """Take the reducer off the module: gradients are each rank's own again."""
        self._handle.remove()
        self._members.release_all()
        for entries in (self._entries, self._new, self._gone):
            entries.clear()
        self._schedule = Schedule()

    def register_comm_hook(self, hook: CommHook) -> None:
        """Replace the all-reduces of buckets, to compress them for example; see :class:`GradientBucket`.

        The hook returns the reduced tensor, or a ``Pending`` of it, in any dtype, with the buffer's number of elements.
        It must start the same collectives on every rank.

        Raises RuntimeError inside of a backward; backward raises what the hook raises, TypeError and ValueError for answers
        that are none.
        """
        if self._backward.current() is not None:
            raise RuntimeError("register_comm_hook in a backward; some of its gradients are on their way already")
        if not callable(hook):
            raise TypeError(f"register_comm_hook got a {type(hook).__name__}; give a function of a GradientBucket")
        self._hook = hook
        for bucket in self._schedule.buckets:
            bucket.hook = hook

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
        if self._backward.current() is None:
            self._begin()
        else:
            self._backward.follow()

    def _begin(self, gradient: torch.Tensor | None = None) -> None:
        """A gradient has been computed; at the first one of a backward none is accumulated yet."""
        if self._backward.current() is not None:
            return
        with torch.no_grad(), no_torch_function():
            self._break_off()
            self._backward.follow()
            self._is_begun, self._is_synced = True, self._syncs
            self._prepare()

    def _prepare(self) -> None:
        """Put complete gradients aside: what comes now is each rank's own contribution."""
        self._arrived = False
        if not self._has_looked:  # the forward was not the module's
            self._see_changes()
        self._has_looked = self._has_older = self._has_carries = False
        self._schedule.versions = versions = {}
        for entry in (*self._entries, *self._new):
            if entry.parameter.grad is None:
                entry.carry = None  # zero_grad() is about what is hidden, too
                continue
            if entry.set_aside():
                versions[id(entry.parameter)] = entry.parameter.grad._version
            self._has_carries |= entry.carry is not None
        self._has_older = bool(versions)

    def _see_changes(self) -> None:
        """Look after parameters that the module has got; nothing is communicated."""
        if not self._members.have_changed():
            return
        new, gone = self._members.changes()
        self._members.watch(new)
        self._members.release(gone)
        self._new = [entry for entry in self._new if entry not in gone] + new
        self._gone += [entry for entry in self._entries if entry in gone]

    def _take(self, entry: Entry, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        self._arrived = True
        if not self._syncs:
            return
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self._take(entry, parameter)
            return
        slot = entry.plain_slot
        if slot is None or not slot.bucket.accept(slot):
            with no_torch_function():
                self._place(entry)
        elif slot.bucket.num_missing <= 0:
            self._schedule.launch_full()

    def _place(self, entry: Entry) -> None:
        """Hand this rank's contribution over to its bucket."""
        gradient = entry.parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"{entry.name}.grad comes as a {gradient.layout} tensor, which is not reduced; make it dense "
                "(nn.Embedding(sparse=False))"
            )
        entry.parameter.grad = None
        arrival = entry.arrival_of(gradient)
        local = local_part(gradient)
        for slot in entry.slots:
            if (slot.arrival is arrival or slot.arrival == arrival) and not slot.bucket.is_launched:
                slot.bucket.arrive(slot, entry.staged(arrival, slot.contribution, local))
                if slot.bucket.num_missing <= 0:
                    self._schedule.launch_full()
                return
        way = entry.contribution(arrival)
        local = entry.staged(arrival, way, local)
        if way.reduction is None:
            entry.deliver(way, local.detach())
            return
        known = self._unplaced.get((entry, arrival))
        if known is None:
            self._unplaced[entry, arrival] = (local, 1)
        else:
            self._unplaced[entry, arrival] = (known[0].add_(local), known[1] + 1)

    def _end(self) -> None:
        """The outermost backward has ended."""
        with torch.no_grad(), no_torch_function():
            self._arrived = self._arrived or self._schedule.has_news()
            if self._arrived and self._syncs:
                self._reduce()
                self._has_reduced = True
                return
            if self._arrived:
                self._has_reduced = False  # there is something to reduce again
            for entry in (*self._entries, *self._new):
                entry.settle()
            self._is_begun = False

    def recover(self) -> None:
        """Before a forward: see what has changed, and end a backward that an exception broke off."""
        if self._backward.current() is not None and in_backward():
            return
        if self._is_begun:
            with torch.no_grad(), no_torch_function():
                self._break_off()
        self._see_changes()
        self._has_looked = True

    def _break_off(self) -> None:
        """End a backward that an exception broke off, if one was. Collectives that other ranks may have started are
        carried out, with nan for what has not come: a rank without exception must not take the sums for complete."""
        if not self._is_begun:
            return
        self._backward.forget()
        if self._is_synced:
            self._schedule.launch_all(missing=math.nan)
            self._schedule.finish()
            self._has_reduced = True
        self._finish_step()

    # The end of a step

    def _reduce(self) -> None:
        """Launch what is left, learn what is new, and complete all gradients."""
        if self._new or self._gone:
            self._agree_on_changes()
        if self._has_older:
            for entry in self._entries:  # accumulated under no_sync, and not touched by the last backward
                gradient = entry.parameter.grad
                if gradient is not None and not entry.is_complete(gradient):
                    self._place(entry)
        self._schedule.launch_all()
        for slot in self._schedule.latecomers():
            self._place(slot.entry)
        if self._unplaced or self._has_unoffered():
            self._learn()
            self._schedule.launch_all()
        self._schedule.finish()
        self._deliver()
        self._finish_step()

    def _has_unoffered(self) -> bool:
        """Whether places are still to be agreed on for trained parameters."""
        self._unoffered = [entry for entry in self._unoffered if not entry.is_offered]
        return any(entry.parameter.requires_grad for entry in self._unoffered)

    def _deliver(self) -> None:
        """Make what has been reduced the parameters' gradients."""
        untouched = self._schedule.untouched()
        is_regular = not untouched and not self._has_carries
        for bucket in self._schedule.buckets:
            if bucket.reduction.scatter is not None:
                for slot in bucket.slots:
                    if slot not in untouched:
                        slot.entry.deliver_scattered(slot)
                continue
            if is_regular and bucket.give_results():  # marked as complete
                continue
            for slot, result in zip(bucket.slots, bucket.results().tensors):
                if slot not in untouched:
                    slot.entry.deliver(slot.contribution, result)

    def _agree_on_changes(self) -> None:
        """Number new parameters. What is gone leaves with the schedule, after this step."""
        gone = set(self._gone)
        self._entries = [entry for entry in self._entries if entry not in gone]
        self._unplaced = {key: value for key, value in self._unplaced.items() if key[0] not in gone}
        names = sorted(entry.name for entry in gone)
        self._agree(sorted(self._new, key=lambda entry: entry.name), f"no longer there: {names}")
        self._is_outdated |= bool(gone)
        self._new, self._gone = [], []

    def _finish_step(self) -> None:
        for bucket in self._schedule.close():
            self._follow(bucket)
        self._unplaced.clear()
        if self._has_carries:
            for entry in (*self._entries, *self._new):
                entry.take_carry()
        if self._is_outdated:
            self._is_outdated = False
            self._schedule = Schedule()
            for entry in self._entries:
                entry.drop_slots()
                self._members.hear(entry, True)
            self._unoffered = list(self._entries)
        self._is_begun = False

    def _follow(self, bucket: Bucket) -> None:
        """Have hooks where the bucket listens."""
        for slot in bucket.slots:
            self._members.hear(slot.entry, slot.is_heard)

    def _learn(self) -> None:
        """Agree on places for gradients that have none, and give them these."""
        observed = [Observed(entry.index, arrival, count) for (entry, arrival), (_, count) in self._unplaced.items()]
        unseen = [e.index for e in reversed(self._entries) if e.parameter.requires_grad and not e.is_offered]
        agreed, offered = agree_on_arrivals(
            observed,
            unseen,
            lambda index: self._entries[index].name,
            lambda found: self._entries[found.index].arrival_text(found.arrival),
            self._consensus,
        )
        seen = {item.index for item in agreed}
        found = [(self._entries[item.index], item.arrival, item.count) for item in agreed]
        for entry in (self._entries[index] for index in offered):
            # A rank may use a parameter that others never do. Of a DTensor's own axes nothing is known; there all ranks
            # use what any rank uses.
            entry.is_offered = True
            if entry.index not in seen and not entry.slots:
                found.append((entry, entry.known_arrival(), 1))
        slots = self._slots(found)
        self._schedule.extend(slots, self._bucket_bytes, self._mesh.device_type, self._hook)
        for slot in slots:
            slot.entry.add_slot(slot)
            if len(slot.entry.slots) > 1:  # which of them a gradient belongs to is seen when it comes
                for each in slot.entry.slots:
                    each.bucket.attention.insist(each)
                    self._follow(each.bucket)
            come = self._unplaced.get((slot.entry, slot.arrival))
            if come is not None:
                slot.bucket.arrive(slot, come[0])

    def _slots(self, found: Sequence[tuple[Entry, Arrival, int]]) -> list[Slot]:
        ways = [(entry, arrival, entry.contribution(arrival), count) for entry, arrival, count in found]
        return [e.slot(arrival, way, n) for e, arrival, way, n in ways if way.reduction is not None]


def _ranks(entries: Sequence[Entry], mesh: DeviceMesh) -> tuple[int, ...]:
    """Everyone whose collectives must match this rank's: the ranks of a mesh that all parameters' meshes are axes of, as
    far as such a mesh is known."""
    home = mesh
    for own in {entry.home.mesh for entry in entries} - {None}:
        assert own is not None
        union = unite(own, home)
        if union is not None and union.home.size() > home.size():
            home = union.home
    return tuple(sorted(home.mesh.flatten().tolist()))
