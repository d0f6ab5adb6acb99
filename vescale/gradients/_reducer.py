"""``GradientReducer``: reduces the gradients of DTensor models and of plain modules in buckets while backward runs."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from vescale.comm import DEFAULT_BUCKET_BYTES, BucketBytes, bucket_limits, link_of, plan_buckets
from vescale.compat import HookGate, ParameterRow, at_end_of_backward, in_backward, no_torch_function
from vescale.errors import ArgumentTypeError, GradientError, GradientReducerError, kind_of
from vescale.gradients._agreed_parameters import AgreedParameters
from vescale.gradients._arrival_hooks import HooksOfPrograms, refuse_hooked_nodes
from vescale.gradients._bucket import Bucket
from vescale.gradients._bucket_memory import BucketSlot
from vescale.gradients._comm_hook import CommHook
from vescale.gradients._complete_gradient import local_part
from vescale.gradients._hooked_parameters import HookedParameters
from vescale.gradients._one_backward import OneBackward
from vescale.gradients._parameter import GradientRule, ReducedParameter
from vescale.gradients._reducer_turns import ReducerTurn
from vescale.gradients._reduction import Arrival, Policy

# ``Schedule``: the buckets of a reducer, in the order in which every rank launches them.


@dataclass
class Schedule:
    """Buckets in the order in which every rank launches them; buckets are only added.

    If a bucket takes two collectives, the second one starts right after the first one of the next bucket: at that point the
    order is the same on every rank, as it must be within a group, and the first collective has had time to finish.
    """

    turn: ReducerTurn
    buckets: list[Bucket] = field(default_factory=list)
    num_launched: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    """Versions of the gradients that existed when the backward began; see :data:`Versions`."""
    undelivered: set[BucketSlot[Bucket]] = field(default_factory=set)
    """Slots to which no rank has contributed in the last step."""

    def extend(
        self,
        slots: Sequence[BucketSlot[Bucket]],
        bucket_bytes: BucketBytes,
        device_type: str,
        hook: CommHook | None = None,
    ) -> None:
        """Put slots, given in the order in which their gradients arrive, into new buckets."""
        self.buckets += make_buckets(slots, bucket_bytes, device_type, len(self.buckets), hook)

    def launch_full(self) -> None:
        """Launch buckets in order, up to the first one that is not ready, unless other reducers come first."""
        if not self.turn.may_launch:
            return
        while self.num_launched < len(self.buckets) and self.buckets[self.num_launched].is_ready(self.versions):
            self._launch_next(is_ready=True)

    def launch_all(self, missing: float | None = None) -> None:
        """Launch the remaining buckets; ``missing`` as in :meth:`Bucket.launch`."""
        while self.num_launched < len(self.buckets):
            self._launch_next(missing)

    def _launch_next(self, missing: float | None = None, is_ready: bool = False) -> None:
        if not self.num_launched:
            self.turn.take()
        if missing is None and not is_ready:
            self.buckets[self.num_launched].is_ready(self.versions)
        self.buckets[self.num_launched].launch(self.versions, missing)
        if self.num_launched:
            self.buckets[self.num_launched - 1].advance()
        self.num_launched += 1

    def finish(self) -> None:
        """Wait for all launched buckets; their results are available afterwards."""
        launched = self.buckets[: self.num_launched]
        for bucket in launched:
            bucket.advance()
        for bucket in launched:
            bucket.finish()

    def count_arrivals(self, *, in_hooks: bool, may_place: bool = False) -> None:
        """Set whether hooks may count gradients without calling Python; ``may_place``: and copy them to their buckets, as no
        parameter has another gradient."""
        for bucket in self.buckets:
            if in_hooks and not bucket.is_launched:
                bucket.count_arrivals(may_place=may_place)
            else:
                bucket.arrivals.stop()

    def has_untaken(self) -> bool:
        """Whether a gradient has arrived that no hook announced to Python."""
        return any(bucket.has_arrivals() or bucket.has_unannounced(self.versions) for bucket in self.buckets)

    def latecomers(self) -> list[BucketSlot[Bucket]]:
        """The collected slots whose parameters got another gradient after their bucket was launched."""
        return [
            slot
            for bucket in self.buckets
            if bucket.muting.parameters.have_grads()
            for slot, parameter in zip(bucket.muting.collected, bucket.muting.parameters.tensors)
            if parameter.grad is not None
        ]

    def unused(self) -> set[BucketSlot[Bucket]]:
        """The slots that no rank has contributed to. Waits for the device, once, only if a slot is absent on this rank."""
        incomplete = [bucket for bucket in self.buckets if bucket.absent]
        if not incomplete:
            return set()
        flags = torch.cat([bucket.is_unused for bucket in incomplete]).tolist()
        return {slot for slot, flag in zip((slot for bucket in incomplete for slot in bucket.absent), flags) if flag}

    def deliver(self, *, has_previous: bool) -> None:
        """Make the results of all buckets the parameters' gradients; ``has_previous``: some have complete ones aside."""
        unused = self.undelivered = self.unused()
        is_regular = not unused and not has_previous
        for bucket in self.buckets:
            if is_regular and bucket.give_results():  # the results are marked as complete
                continue
            for slot, result in zip(bucket.slots, bucket.results().tensors):
                if slot not in unused:
                    slot.owner.deliver(slot.contribution, result)

    def close(self) -> None:
        """Prepare for the next step."""
        self.num_launched = 0
        self.versions = {}
        self.turn.end()
        for bucket in self.buckets:
            bucket.close()


def new_slots(found: Sequence[tuple[ReducedParameter, Arrival, int]]) -> list[BucketSlot[Bucket]]:
    """Slots for (parameter, arrival, number of arrivals in a backward), except for complete gradients."""
    return [
        reduced.new_slot(arrival, count)
        for reduced, arrival, count in found
        if reduced.contribution(arrival).reduction is not None
    ]


def make_buckets(
    slots: Sequence[BucketSlot[Bucket]],
    bucket_bytes: BucketBytes,
    device_type: str,
    first: int = 0,
    hook: CommHook | None = None,
) -> list[Bucket]:
    """New buckets, without memory, for slots in the order in which their gradients arrive."""
    items = []
    num_ranks = 1
    for slot in slots:
        num_ranks = max(num_ranks, *(stage.axes.num_ranks for stage in slot.reduction.stages))
        items.append((slot.reduction, slot.num_bytes))
    if not items:
        return []
    limits = bucket_limits(bucket_bytes, num_ranks, link_of(device_type))
    return [
        Bucket(first + number, items[indices[0]][0], [slots[index] for index in indices], hook)
        for number, indices in enumerate(plan_buckets(items, limits))
    ]


# ``BackwardTracker``: whether a backward is running, and a callback at its end.


class BackwardTracker:
    """The backward that has reached some parameters, from its first gradient to its end.

    Attributes:
        current: a callable that returns None while no backward is running.
        gate: shut for one that is running; for hooks that only have to detect its first gradient.

    Args:
        at_end: called when the outermost backward has ended without an exception, unless :meth:`forget` was called before.
        at_exception: called when an exception has ended it, likewise, or ``at_end``.
    """

    def __init__(self, at_end: Callable[[], None], at_exception: Callable[[], None] = lambda: None) -> None:
        self.gate = HookGate()
        self.current: Callable[[], object | None] = _nothing
        self._at_end, self._at_exception = at_end, at_exception

    def follow(self) -> None:
        """Called inside a backward: mark it as running. A second call moves ``at_end`` behind everything that has been
        queued for the end of the backward since."""
        token = _Token()
        # Only the engine holds the token, which is therefore gone when the backward ends, with or without an exception.
        self.current = weakref.ref(token, self._is_over)
        self.gate.shut_here()
        at_end_of_backward(functools.partial(self._end, token))

    def forget(self) -> None:
        self.current = _nothing
        self.gate.open()

    def _is_over(self, token: object) -> None:
        self.gate.open()
        if self.current is token:  # neither at its end nor forgotten
            self._at_exception()

    def _end(self, token: _Token) -> None:
        if self.current() is not token:
            return
        try:
            self.forget()
            self._at_end()
        except BaseException:
            self._at_exception()
            raise


class _Token:
    """Represents one backward."""


def _nothing() -> None:
    """Stands for a dead weak reference."""


# ``CompleteArrivals``: parameters whose gradients arrive complete, and need no hook that says so.

# Each time, hooks are removed and registered anew.
_MAX_MUTINGS = 4


class CompleteArrivals:
    """Mutes the hooks of parameters whose gradients arrive complete, as on a mesh without data parallelism. They are
    looked at when backward ends, which saves a call into Python for each.

    =================================================  ==========================================================
    event                                              hooks
    =================================================  ==========================================================
    a backward ends                                    muted, of parameters whose gradients arrived complete
    a backward begins on top of a gradient,            of this parameter, or of all: called again
    or without synchronization
    at the end, a gradient is not complete             called again; the gradient is taken then
    =================================================  ==========================================================
    """

    def __init__(self) -> None:
        self._found: list[ReducedParameter] = []
        self._muted: list[ReducedParameter] = []
        self._row: ParameterRow | None = None  # of the muted ones
        self._num_mutings = 0

    def begin(self, syncs: bool, may_have: bool) -> None:
        """Called before the first gradient of a backward, when complete gradients have been set aside; ``may_have``: some
        parameters may have gradients, there or aside."""
        self._found.clear()
        if syncs and not may_have:
            return
        others = [r for r in self._muted if not syncs or r.previous is not None or r.parameter.grad is not None]
        for reduced in others:
            self._remove(reduced)
            reduced.notify(True)

    def note(self, reduced: ReducedParameter) -> None:
        """Called when a hook has announced a gradient that is complete."""
        if not reduced.slots and reduced.rule.source is None:  # so that the gradient's spec says that it is complete
            self._found.append(reduced)

    def end(self, take: Callable[[ReducedParameter, Any], None]) -> bool:
        """At the end of a backward, whether there are gradients of muted parameters; ``take`` gets those that are not
        complete."""
        muted, others = self._muted, []
        arrived = bool(muted)
        if muted and not self._row_of_muted().are_complete([reduced.complete_spec for reduced in muted]):
            arrived = self._row_of_muted().have_grads()
            others = [r for r in muted if r.parameter.grad is not None and not r.is_complete_as_before()]
        for reduced in others:
            self._remove(reduced)
            if reduced.hooks is not None:  # it still belongs to the model
                reduced.notify(True)
                take(reduced, reduced.parameter)
        if self._found and self._num_mutings < _MAX_MUTINGS:
            self._num_mutings += 1
            for reduced in self._found:
                reduced.notify(False)
            self._muted += self._found
            self._row = None
        self._found.clear()
        return arrived

    def _remove(self, reduced: ReducedParameter) -> None:
        self._muted.remove(reduced)
        self._row = None

    def _row_of_muted(self) -> ParameterRow:
        if self._row is None:
            self._row = ParameterRow([reduced.parameter for reduced in self._muted])
        return self._row


# Validation of a reducer's arguments.


def check_settings(
    module: nn.Module, mesh: DeviceMesh, bucket_bytes: BucketBytes, reduce_dtype: torch.dtype | None, op: str | None
) -> None:
    """Raises TypeError and ValueError for invalid arguments of a reducer, before any communication."""
    if not isinstance(module, nn.Module) or not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(
            f"GradientReducer of {kind_of(module)} over {kind_of(mesh)}; pass an nn.Module and a DeviceMesh"
        )
    if op not in (None, "avg", "sum"):
        raise GradientReducerError(
            f"GradientReducer: op={op!r}; use 'avg', 'sum', or None for the operation of the gradients' placements"
        )
    if reduce_dtype is not None and not (
        isinstance(reduce_dtype, torch.dtype) and (reduce_dtype.is_floating_point or reduce_dtype.is_complex)
    ):
        raise GradientReducerError(
            f"GradientReducer: reduce_dtype={reduce_dtype!r}; use a floating-point or complex torch.dtype, or None for "
            "each gradient's own"
        )
    if mesh.get_coordinate() is None:
        raise GradientReducerError(
            f"GradientReducer over {mesh}, which this rank is not part of; create it on the mesh's ranks only"
        )
    bucket_limits(bucket_bytes, 1, link_of(mesh.device_type))


class GradientReducer:
    """Reduces gradients over all axes on which they are Partial, several in one collective, overlapped with backward.

    For stock DTensor models, for plain modules that every rank feeds its own part of the batch, and for mixtures.

    ========================  =========================================================================================
    moment                    ``parameter.grad``
    ========================  =========================================================================================
    in backward               moves to its bucket, a small one of a plain parameter when all gradients of the bucket have
                              arrived; a full bucket is reduced while backward continues
    ``backward()`` returned   complete: a view of its bucket, placed as the parameter; None if no rank used the parameter
    under :meth:`no_sync`     this rank's contribution: plain, or still Partial; further backwards add to it in the bucket
    :meth:`finish`            as after backward; for ranks whose backward reached no parameter
    ========================  =========================================================================================

    Reduced axes: for a DTensor gradient, those on which it is Partial and its parameter is not, and the axes of ``mesh``
    that its own mesh lacks; for a plain gradient, all axes of ``mesh``. The axes are joined to one group; if no mesh is
    known that both meshes are parts of, there is one collective each. Communication: one all-reduce per bucket, or, if the
    parameter is sharded on one of the axes and the ring model predicts that it is faster, a reduce-scatter and an
    all-reduce of the piece.

    The buckets are determined in the first step, whose gradients are reduced at its end: a bucket holds gradients with the
    same axes, op, dtype and destination, in the order in which they become ready on the first rank. All ranks compare their
    observations through the store, and launch the same buckets in the same order from then on; if a rank does not use a
    parameter, it contributes zeros. Gradients that arrive for the first time later (another part of the model is trained,
    other placements) get their buckets in the same way at the end of their backward.

    Parameters may be frozen, unfrozen, replaced and added later, in the same way on every rank. Reducers of the same ranks
    reduce in one order on all of them: with several, ranks compare who reduces before each reduction.

    Args:
        module: its parameters are reduced, except those on meshes that this rank is not part of.
        mesh: the mesh over which plain gradients are reduced, and to whose axes ``op`` applies.
        bucket_bytes: the largest size of a bucket (the first one has about 1 MiB); a list: the size of each bucket in turn;
            ``"auto"``: sizes that grow up to the one at which latency no longer matters.
        reduce_dtype: the dtype of the communication; None: each gradient's own.
        op: how the ranks' gradients along the axes of ``mesh`` are combined. None: a DTensor by its Partial, plain gradients
            by their average. On other axes a DTensor's Partial decides.
        timeout: how long comparisons wait for other ranks; None: as long as collectives.

    Raises:
        GradientError: on every rank, if the ranks have different modules or settings; later, in ``backward()``, if
            the gradient of one parameter arrives in different ways; there OrderMismatchError, if reducers take turns in
            different orders.
        ConsensusError: some ranks do not take part in a comparison; the error names them.
        TypeError: ``module`` is no module, or ``mesh`` no mesh.
        ValueError: a mesh that overlaps a parameter's without both being parts of one mesh; an unknown op or dtype; invalid
            sizes; a parameter that has a reducer already, or whose gradient ``fully_shard``, DDP or ``parallelize`` reduces.
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
        self._mesh, self._bucket_bytes = mesh, bucket_bytes
        self._policy = Policy(mesh, op, reduce_dtype)
        self._hook: CommHook | None = None
        self._syncs = True
        self.around_no_sync: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """A context that :meth:`no_sync` enters as well."""
        self.before_finish: Callable[[], None] = lambda: None
        """What :meth:`finish` calls first."""
        self._backward = BackwardTracker(self._end, self._show_previous)
        self._complete = CompleteArrivals()
        self._is_begun = False  # a backward has begun, and its end has not been handled
        self._is_synced = self._arrived = False
        self._has_checked = False  # the module has been checked for changes before the next backward
        self._has_older = False  # contributions of earlier backwards are in `.grad`
        self._has_reduced = self._has_previous = False  # complete gradients are kept aside
        self._may_hide = False  # or have been since it was looked at last
        self._due: list[tuple[HooksOfPrograms, bool | None]] = []
        self._unplaced: dict[tuple[ReducedParameter, Arrival], tuple[torch.Tensor, int]] = {}
        self._parameters = AgreedParameters(
            HookedParameters(module, self._policy, self._begin, self._take, self._backward.gate),
            mesh,
            f"op={op} bucket_bytes={bucket_bytes} reduce_dtype={reduce_dtype}",
            timeout,
        )
        self._schedule = Schedule(self._parameters.turn)
        self._handle = module.register_forward_pre_hook(lambda *_: self.recover())

    def share_backward(self, one_backward: OneBackward, is_compared: Callable[[], bool]) -> None:
        """Note the running backward of this model in ``one_backward``, which others use, too. ``is_compared``: whether ranks
        compare whose backward runs, before it does."""
        self._parameters.turn.one_backward, self._parameters.turn.is_compared = one_backward, is_compared

    def add(self, parameters: Sequence[tuple[str, nn.Parameter, GradientRule]]) -> None:
        """Reduce the gradients of more ``parameters``, on the meshes of known ones; all ranks must make the same call.
        Raises GradientError and ValueError as the constructor does."""
        self._parameters.add(parameters)

    # Public

    @property
    def num_buckets(self) -> int:
        """Of a step. Before the first step: if the gradient of every replicated parameter is Partial."""
        return len(self.buckets)

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order in which they are launched; for reports and tests."""
        if self._schedule.buckets:
            return self._schedule.buckets
        trained = [reduced for reduced in reversed(self._parameters.agreed) if reduced.parameter.requires_grad]
        guessed = new_slots([(reduced, reduced.likely_arrival(), 1) for reduced in trained])
        return make_buckets(guessed, self._bucket_bytes, self._mesh.device_type)

    @property
    def syncs(self) -> bool:
        """Whether a backward that begins now reduces gradients."""
        return self._syncs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate this rank's gradients; the first one outside reduces the total."""
        before, self._syncs = self._syncs, False
        self._schedule.count_arrivals(in_hooks=False)
        try:
            with self.around_no_sync():
                yield
        finally:
            self._syncs = before

    def finish(self) -> None:
        """Complete the gradients of this step on a rank whose backward reached no parameter, and those accumulated under
        :meth:`no_sync`. Does nothing if a backward has done so since the last call, or inside :meth:`no_sync`.

        If the backward of some rank may reach no parameter, call this in every step on every rank. A call that is made in
        some steps only counts as the end of the step before, and the other ranks hang.
        """
        if not self._syncs:
            return
        self.before_finish()
        with torch.no_grad(), no_torch_function():
            self._break_off()
            if not self._has_reduced:
                self._prepare()
                self._reduce()
        self._has_reduced = False
        self._call_hooks_of_programs()

    def remove(self) -> None:
        """Remove the reducer from the module: gradients stay each rank's own again."""
        self._handle.remove()
        self._parameters.release_all()
        self._schedule = Schedule(self._parameters.turn)

    def register_comm_hook(self, hook: CommHook) -> None:
        """Replace the all-reduces of buckets, for example to compress them: ``hook`` gets each :class:`GradientBucket`.

        The hook returns the reduced tensor, or a ``Pending`` of it, in any dtype, with the buffer's number of elements.
        It must start the same collectives on every rank.

        Raises RuntimeError inside a backward. ``backward()`` raises what the hook raises, and TypeError or ValueError for an
        invalid result.
        """
        if self._backward.current() is not None:
            raise GradientError(
                "register_comm_hook was called during a backward, some of whose gradients are "
                "already being reduced; call it between steps"
            )
        if not callable(hook):
            raise ArgumentTypeError(f"register_comm_hook got {kind_of(hook)}; pass a function of a bucket")
        self._hook = hook
        for bucket in self._schedule.buckets:
            bucket.hook = hook

    def describe(self) -> list[str]:
        """One line per bucket: gradients, bytes, axes, op, and the bytes that a rank sends."""
        return [
            f"bucket {b.index}: {len(b.slots)} gradients, {b.num_bytes} bytes, {b.reduction.text()}, "
            f"{b.num_collectives} collectives of {b.moved_bytes} bytes"
            for b in self.buckets
        ]

    # Backward

    def begin(self) -> None:
        """Called inside a backward by code that will write gradients to ``.grad`` in a callback at its end, after that
        callback was queued: this reducer's work then follows it."""
        if self._backward.current() is None:
            self._begin()
        else:
            self._backward.follow()

    def _begin(self, gradient: torch.Tensor | None = None) -> None:
        """Called for each gradient before it is accumulated; only the first one of a backward matters."""
        self._parameters.turn.enter()
        if self._backward.current() is not None:
            return
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self._begin(gradient)
            return
        with no_torch_function():
            if self._is_begun:
                self._break_off()
            row = self._parameters.row
            refuse_hooked_nodes(row, (reduced.name for reduced in self._parameters), before=False)
            self._backward.follow()
            self._is_begun, self._is_synced = True, self._syncs
            self._parameters.turn.begin(self._backward.current, self._give_up)
            self._schedule.count_arrivals(in_hooks=self._syncs, may_place=not self._prepare())

    def _prepare(self) -> bool:
        """Set complete gradients aside: what arrives now is this rank's contribution. Returns whether there may be any."""
        self._arrived = False
        for hooks in self._parameters.hooks_of_programs.values():
            hooks.begin()
        if not self._has_checked:  # the module's own forward has not run
            self._check_changes()
        self._has_checked = self._has_older = self._has_previous = False
        self._schedule.versions = versions = {}
        may_have = self._may_hide or self._parameters.row.have_grads()
        if may_have:
            for reduced in self._parameters:
                if reduced.parameter.grad is None:
                    reduced.previous = None  # zero_grad() applies to the hidden gradient, too
                    continue
                if reduced.set_aside():
                    versions[id(reduced.parameter)] = reduced.parameter.grad._version
                self._has_previous |= reduced.previous is not None
            self._may_hide = self._has_previous
        self._has_older = bool(versions)
        self._complete.begin(self._syncs, may_have)
        return may_have

    def _check_changes(self) -> None:
        self._parameters.check_changes()

    def _take(self, reduced: ReducedParameter, parameter: nn.Parameter) -> None:
        """Called after a gradient has been accumulated."""
        self._arrived = True
        if not self._syncs or parameter.grad is None:  # autograd also calls where a gradient is undefined
            return
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self._take(reduced, parameter)
            return
        if reduced.is_complete_as_before():
            self._complete.note(reduced)
            return
        slot = reduced.plain_slot
        if slot is None or not slot.bucket.accept(slot):
            with no_torch_function():
                self._hand_over(reduced)
        elif slot.bucket.arrivals.num_missing <= 0:
            self._schedule.launch_full()

    def _hand_over(self, reduced: ReducedParameter) -> None:
        """Move this rank's contribution to its bucket."""
        gradient = reduced.parameter.grad
        assert gradient is not None
        arrival, local = reduced.arrival_of(gradient), local_part(gradient)
        reduced.parameter.grad = None
        for slot in reduced.slots:
            if (slot.arrival is arrival or slot.arrival == arrival) and not slot.bucket.is_launched:
                slot.note_spec_of(gradient)
                slot.bucket.arrive(slot, reduced.staged(arrival, slot.contribution.staged, local))
                if slot.bucket.arrivals.num_missing <= 0:
                    self._schedule.launch_full()
                return
        contribution = reduced.contribution(arrival)
        local = reduced.staged(arrival, contribution.staged, local)
        if contribution.reduction is None:
            reduced.deliver(contribution, local.detach())
            reduced.remember_complete(gradient)
            return
        known = self._unplaced.get((reduced, arrival))
        self._unplaced[reduced, arrival] = (local, 1) if known is None else (known[0].add_(local), known[1] + 1)

    def _end(self) -> None:
        """The outermost backward has ended."""
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self._end()
            return
        with no_torch_function():
            has_complete = self._complete.end(self._take)
            self._arrived = self._arrived or has_complete or self._schedule.has_untaken()
            if self._arrived and self._syncs:
                self._reduce()
                self._has_reduced = True
            else:
                self._has_reduced &= not self._arrived  # there may be something to reduce again
                self._schedule.count_arrivals(in_hooks=False)
                for reduced in self._parameters:
                    reduced.settle()
                self._parameters.turn.end()
                self._is_begun = False
        self._call_hooks_of_programs()

    def _note_hooks_of_programs(self) -> None:
        """Which ones are due when this step has ended, in the order in which backwards reach parameters."""
        waiting = self._parameters.hooks_of_programs
        for reduced in reversed(list(self._parameters)) if waiting else ():
            hooks, slots = waiting.get(id(reduced.parameter._post_accumulate_grad_hooks)), reduced.slots
            if hooks is not None:
                is_reduced = any(slot not in self._schedule.undelivered for slot in slots) if slots else None
                self._due.append((hooks, is_reduced))

    def _call_hooks_of_programs(self) -> None:
        """Those for accumulated gradients, of which all are complete."""
        due, self._due = self._due, []
        for hooks, is_reduced in due:
            hooks.end(is_reduced)

    def recover(self) -> None:
        """Before a forward: detect changes, and finish a backward that an exception ended."""
        if self._backward.current() is not None and in_backward():
            return
        if self._is_begun:
            with torch.no_grad(), no_torch_function():
                self._break_off()
        self._check_changes()
        self._has_checked = True

    def _give_up(self) -> None:
        """Of a backward in which ranks reduce in different orders, nothing remains. Nothing has been launched."""
        self._backward.forget()
        self._parameters.drop_gradients()
        self._finish_step()

    def _show_previous(self) -> None:
        """An exception has ended a backward: where nothing is to be seen of it, ``.grad`` is what it was before, for the
        program to read or clear until the step is broken off."""
        for reduced in self._parameters if self._has_previous else ():
            reduced.restore_previous()

    def _break_off(self) -> None:
        """Finish a backward that an exception ended, if there was one. Collectives that other ranks may have started are
        carried out, with nan for missing contributions, so that no rank takes the sums for complete."""
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
        """Launch the remaining buckets, add slots for new gradients, and complete all gradients."""
        self._parameters.turn.take()
        if removed := self._parameters.agree_on_changes():
            self._unplaced = {key: value for key, value in self._unplaced.items() if key[0] not in removed}
        if self._has_older:
            for reduced in self._parameters.agreed:  # accumulated under no_sync, and not reached by the last backward
                gradient = reduced.parameter.grad
                if gradient is not None and not reduced.is_complete(gradient):
                    self._hand_over(reduced)
        if self._schedule.buckets:
            self._schedule.launch_all()
            for slot in self._schedule.latecomers():
                self._hand_over(slot.owner)
        if self._unplaced or self._parameters.has_unoffered():
            self._add_slots()
            self._schedule.launch_all()
        if self._schedule.buckets:
            self._schedule.finish()
            self._schedule.deliver(has_previous=self._has_previous)
        self._note_hooks_of_programs()
        self._finish_step()

    def _finish_step(self) -> None:
        self._schedule.close()
        self._unplaced.clear()
        if self._has_previous:
            for reduced in self._parameters:
                reduced.restore_previous()
        if self._parameters.is_outdated:
            self._schedule = Schedule(self._parameters.turn)
            self._parameters.drop_slots()
        self._is_begun = False

    def _add_slots(self) -> None:
        """Agree on slots for gradients that have none, and add them to the schedule."""
        arrivals = {key: count for key, (_, count) in self._unplaced.items()}
        found = self._parameters.agree_on_arrivals(arrivals)
        slots = new_slots(found)
        self._schedule.extend(slots, self._bucket_bytes, self._mesh.device_type, self._hook)
        for slot in slots:
            slot.owner.add_slot(slot)
            if len(slot.owner.slots) > 1:  # to which of them a gradient belongs is known when it arrives
                for each in slot.owner.slots:
                    each.bucket.muting.never_collect(each)
            waiting = self._unplaced.get((slot.owner, slot.arrival))
            if waiting is not None:
                slot.bucket.arrive(slot, waiting[0])
