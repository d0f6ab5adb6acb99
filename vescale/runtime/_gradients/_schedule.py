"""Which buckets there are, and in which order they are reduced: learned, and the same on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vescale.comm import BucketBytes, Consensus, bucket_limits, link_of, plan_buckets
from vescale.runtime._gradients._bucket import Bucket
from vescale.runtime._gradients._comm_hook import CommHook
from vescale.runtime._gradients._reduction import Arrival
from vescale.runtime._gradients._slot import Slot
from vescale.runtime._gradients._untouched import is_untouched

__all__ = ["GradientMismatchError", "Observed", "Schedule", "agree_on_arrivals", "agree_on_parameters"]


class GradientMismatchError(RuntimeError):
    """Ranks bring different gradients, so that their collectives would not match."""


@dataclass(frozen=True)
class Observed:
    """A gradient that has come without having a place: the parameter's index, how it came, and how often."""

    index: int
    arrival: Arrival
    count: int


@dataclass
class Schedule:
    """Buckets in the order in which every rank launches them; it only grows.

    A bucket that takes two collectives starts the second one right after the next bucket's first: at a moment that is the
    same on every rank, as collectives of one group must be, and at which the one it waits for has had a bucket's time.
    """

    buckets: list[Bucket] = field(default_factory=list)
    num_launched: int = 0
    versions: dict[int, int] = field(default_factory=dict)
    """Of gradients that were there when the backward began, by id of the parameter."""

    def extend(
        self, slots: Sequence[Slot], bucket_bytes: BucketBytes, device_type: str, hook: CommHook | None = None
    ) -> None:
        """Give slots, in the order in which their gradients arrive, places in new buckets."""
        self.buckets += make_buckets(slots, bucket_bytes, device_type, len(self.buckets), hook)

    def launch_full(self) -> None:
        """Launch the buckets that are next, as far as they are ready; not one before another that is not."""
        while self.num_launched < len(self.buckets) and self.buckets[self.num_launched].is_ready(self.versions):
            self._launch_next()

    def launch_all(self, missing: float | None = None) -> None:
        """``missing``: what stands for a contribution that has not come; None: nothing."""
        while self.num_launched < len(self.buckets):
            self._launch_next(missing)

    def _launch_next(self, missing: float | None = None) -> None:
        self.buckets[self.num_launched].launch(self.versions, missing)
        if self.num_launched:
            self.buckets[self.num_launched - 1].advance()
        self.num_launched += 1

    def finish(self) -> None:
        """Wait for what has been launched; the results are there then."""
        launched = self.buckets[: self.num_launched]
        for bucket in launched:
            bucket.advance()
        for bucket in launched:
            bucket.finish()

    def has_news(self) -> bool:
        """Whether a gradient has come that nobody was told of."""
        return any(bucket.has_news(self.versions) for bucket in self.buckets)

    def latecomers(self) -> list[Slot]:
        """Slots whose parameters have a gradient again although their buckets have been launched."""
        return [
            slot
            for bucket in self.buckets
            for slot, parameter in zip(bucket.attention.quiet, bucket.attention.parameters.tensors)
            if parameter.grad is not None
        ]

    def untouched(self) -> set[Slot]:
        """The slots that no rank has contributed to. The device is asked once, and only if this rank left a slot out."""
        absent = [(slot, bucket) for bucket in self.buckets for slot in bucket.absent]
        if not absent:
            return set()
        flags = torch.cat([is_untouched(bucket.mark(slot), bucket.op) for slot, bucket in absent]).tolist()
        return {slot for (slot, _), flag in zip(absent, flags) if flag}

    def close(self) -> list[Bucket]:
        """Ready for the next step. Returns the buckets of which other slots are heard from now on."""
        self.num_launched = 0
        self.versions = {}
        return [bucket for bucket in self.buckets if bucket.close()]


def make_buckets(
    slots: Sequence[Slot],
    bucket_bytes: BucketBytes,
    device_type: str,
    first: int = 0,
    hook: CommHook | None = None,
) -> list[Bucket]:
    """Pure but for the buckets, which have no memory yet."""
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


def agree_on_parameters(described: Sequence[str], what: str, consensus: Consensus) -> None:
    """Compare the parameters' descriptions, and the reducers' settings, over all ranks.

    Raises GradientMismatchError on every rank, naming the first parameter that differs.
    """
    text = "\n".join([what, *described])
    messages = [m.decode().split("\n") for m in consensus.exchange(text.encode(), lambda: "making a GradientReducer")]
    for rank, lines in zip(consensus.ranks, messages):
        if lines == messages[0]:
            continue
        for own, first in zip(
            lines + [""] * (len(messages[0]) - len(lines)), messages[0] + [""] * (len(lines) - len(messages[0]))
        ):
            if own != first:
                raise GradientMismatchError(
                    f"rank {rank} has {own or 'no such parameter'!r} where rank {consensus.ranks[0]} has "
                    f"{first or 'no such parameter'!r}; build the same model with the same requires_grad, and the same "
                    "reducer, on every rank"
                )


def agree_on_arrivals(
    observed: Sequence[Observed],
    unseen: Sequence[int],
    name_of: Callable[[int], str],
    describe: Callable[[Observed], str],
    consensus: Consensus,
) -> tuple[list[Observed], list[int]]:
    """The gradients that need places on any rank, and the parameters that are ``unseen`` on any, in the order of the first
    rank that has them; the same on every rank.

    Ranks may have used different parameters, not the same one in different ways: GradientMismatchError on every rank,
    naming the parameter.
    """
    first = f"{name_of(observed[0].index)}.grad comes as {describe(observed[0])} for the first time" if observed else ""

    def about() -> str:
        return first or "no gradient came in this backward"

    payload: Any = [(o.index, o.arrival.placements, o.arrival.dtype, o.count) for o in observed], list(unseen)
    found: list[list[Observed]] = []
    everyones: dict[int, None] = {}
    for message in consensus.exchange(pickle.dumps(payload), about):
        rows, indices = pickle.loads(message)
        found.append([Observed(index, Arrival(placements, dtype), count) for index, placements, dtype, count in rows])
        everyones.update(dict.fromkeys(indices))
    merged: dict[tuple[int, Arrival], Observed] = {}
    kinds: dict[int, tuple[int, frozenset[Arrival]]] = {}
    for rank, list_ in zip(consensus.ranks, found):
        own: dict[int, set[Arrival]] = {}
        for item in list_:
            own.setdefault(item.index, set()).add(item.arrival)
            known = merged.get((item.index, item.arrival))
            if known is None or known.count < item.count:
                merged[item.index, item.arrival] = item
        for index, arrivals in own.items():
            other, expected = kinds.setdefault(index, (rank, frozenset(arrivals)))
            if arrivals != expected:
                texts = [
                    " and ".join(sorted(describe(Observed(index, a, 1)) for a in some)) for some in (arrivals, expected)
                ]
                raise GradientMismatchError(
                    f"{name_of(index)}.grad comes as {texts[0]} on rank {rank}, and as {texts[1]} on rank {other}; run the "
                    "same model code on inputs that are placed alike on every rank"
                )
    return list(merged.values()), list(everyones)
