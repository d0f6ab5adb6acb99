"""``Schedule``: the buckets of a reducer, in the order in which every rank launches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.comm import BucketBytes, bucket_limits, link_of, plan_buckets
from vescale.gradients._bucket import Bucket
from vescale.gradients._bucket_memory import BucketSlot
from vescale.gradients._comm_hook import CommHook
from vescale.gradients._parameter import ReducedParameter
from vescale.gradients._reducer_turns import ReducerTurn
from vescale.gradients._reduction import Arrival


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
    _works: list[Any] = field(default_factory=list)

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
            self._works = bucket.waited

    def release_works(self) -> None:
        """Drop the works of the last step. Until then they are kept, so that no thread of gloo releases them while the
        program exits; see :meth:`Pending.works`."""
        self._works = []

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
