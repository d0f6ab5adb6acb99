"""What ``torch.distributed.pipelining`` has no public name for: schedules from text, and their dry run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules

from vescale.compat.ledger import note
from vescale.compat.needed_names import PIPELINES
from vescale.compat.needs import require

require(PIPELINES)  # this module is no part of what vescale imports at first


def schedule_class(name: str) -> Any:
    return schedules.get_schedule_class(name)


def schedule_from_text(text: str, stages: list[Any], num_microbatches: int, loss: Callable[..., Any] | None) -> Any:
    """A schedule that runs the actions of ``text``: CSV, a line for each rank, computations only."""
    made = schedules._PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss, scale_grads=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "schedule.csv"
        file.write_text(text)
        made._load_csv(str(file), format="compute_only")
    return made


def schedule_order(schedule: Any) -> dict[int, list[Any]]:
    """The computations of each rank of a schedule with several stages, None where it waits."""
    kinds = (schedules.REDUCE_GRAD,)
    return {
        rank: [a for a in actions if a is None or a.computation_type not in kinds]
        for rank, actions in schedule.pipeline_order.items()
    }


def schedule_with_comms(
    order: Mapping[int, Sequence[Any]], stage_to_rank: Callable[[int], int], num_stages: int
) -> Any:
    """The order with sends and receives added. Raises AssertionError or RuntimeError where they cannot be."""
    compute = {rank: [a for a in actions if a is not None] for rank, actions in order.items()}
    return schedules._add_send_recv(compute, stage_to_rank=stage_to_rank, num_stages=num_stages)


def dry_run(with_comms: Mapping[int, Sequence[Any]], stage_to_rank: Callable[[int], int], num_stages: int) -> Any:
    """Run a schedule with communication on paper. Raises ValueError or AssertionError for a deadlock."""
    flat = {rank: [one for a in actions for one in a.sub_actions or (a,)] for rank, actions in with_comms.items()}
    return schedules._simulate_comms_compute(flat, stage_to_rank, num_stages)


def agree_on_sizes(stage: Any) -> None:
    """Before the first step, stages ask each other whether all know the sizes of their messages. ``stage`` takes it that the
    others do, because they do not exist."""
    note("compat.pipelining:instance", stage)
    stage._warmup_backward_result = lambda received_result=None: torch.ones(1, dtype=torch.int32)
