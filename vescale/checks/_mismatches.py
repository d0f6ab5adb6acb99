"""Errors of ranks that do or give different things, and their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "SAME_STEPS",
    "SEVERAL_THREADS",
    "InputMismatchError",
    "StepMismatchError",
    "data_text",
    "uneven_text",
]


class StepMismatchError(RuntimeError):
    """Ranks are about to do different things, or some do not come; ``ranks``: those that differ from most, or are absent."""

    def __init__(self, problem: str, ranks: Sequence[int]) -> None:
        super().__init__(problem)
        self.ranks = tuple(ranks)


class InputMismatchError(StepMismatchError):
    """Ranks give different values where all have to give the same."""


SAME_STEPS = (
    "Every rank has to make the same calls in the same order, also for an evaluation (no `if rank == 0:` around a call of "
    "the model, its backward, or a read of what is cut over ranks), and to see as many batches"
)
SEVERAL_THREADS = (
    ". Here several threads run forwards on equal meshes, and threads take turns in another order on each rank: run them on "
    "one thread, or give the threads an order that is the same on every rank"
)


def uneven_text(found: Sequence[dict[str, Any]], ranks: Sequence[int]) -> str:
    first = {rank: {part[0]: part[1] for part in each["parts"]} for rank, each in zip(ranks, found)}
    return (
        f'parts of inputs that are given as given="local" have different sizes in {found[0]["site"]}: {first}; ranks that '
        "do not wait for each other take them as equal. Give equal parts (drop_last=True), pass the global batch, or set "
        "VESCALE_CHECK=steps"
    )


def data_text(site: str, difference: Any, *, local: bool = False) -> str:
    name = f"the input {difference.name!r}" if difference.name else "an input"
    found = " and ".join(
        f"{text} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {list(ranks)}'}"
        for text, ranks in difference.found
    )
    if local:
        return (
            f"ranks disagree about {name} of {site}, of which they have the same part: {found}. Ranks that differ only on "
            "other axes have to give the same part: use vescale.ShardedBatchSampler(dataset, batch_size, mesh, axes), or "
            "write all axes over which the data differ in the plan's entry. If they differ on purpose: `with "
            "vescale.unchecked():`"
        )
    return (
        f"ranks disagree about {name} of {site}: it is {found}. A plain value is the global one, the same on every rank. If "
        "each rank has its own part of the batch (a DistributedSampler), write that in the plan, "
        'plan.shard("<in:name>", Shard(0), mesh="dp", given="local"), and draw the parts with vescale.ShardedBatchSampler; '
        "or seed the sampler alike on every rank. If values differ on purpose: `with vescale.unchecked():`"
    )
