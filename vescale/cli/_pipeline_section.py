"""The section of ``vescale explain`` about a pipeline: stages, what they send, and the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale.cli._console import bytes_text, new_table

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.estimation import Prediction
    from vescale.pipeline import StagedProgram

_HEAD = (
    "stage",
    "rank",
    "begins before",
    "parameters",
    "state",
    "sends on",
    "sends",
    "receives",
    "gathers",
    "reductions",
)

_NOTE = (
    "state: parameters, gradients and two optimizer states, before other axes shard them; sends on: bytes of a "
    "micro-batch's message to the next stage, before other axes shard it; sends, receives, gathers and reductions: "
    "of one step, on each rank of the stage"
)


def _batch(staged: StagedProgram, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A batch of ones with the shapes of the inputs, and as many rows as micro-batches where they do not divide them."""
    import torch

    m, batch = staged.entry.microbatches, {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            rows = value.shape[0] if value.ndim and value.shape[0] % m == 0 else m
            value = torch.ones((rows, *value.shape[1:]) if value.ndim else (), dtype=value.dtype)
        batch[name] = value
    return batch


def pipeline_as_dict(
    staged: StagedProgram | None, inputs: Mapping[str, Any], prediction: Prediction | None
) -> dict[str, Any] | None:
    """None without a pipeline. Numbers that need the forward are None where it did not run; ``stopped`` says why."""
    if staged is None:
        return None
    from vescale.pipeline import state_bytes

    stopped, counts, known, batch = None, None, None, {}
    schedule, cut = staged.schedule, staged.cut
    if inputs and prediction is not None:
        batch = _batch(staged, inputs)
        try:
            known, counts = staged.traced(batch), staged.counts(batch, prediction.gradients)
        except Exception as error:  # a forward without parameters' values may raise anything: the section shows it
            stopped = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    else:
        stopped = "the shapes of the inputs are not known; pass --input NAME=SHAPE[:DTYPE]"
    stages = []
    for stage in range(cut.num_stages):
        names = [name for name, owners in cut.owners.items() if stage in owners]
        boundary = known.boundaries.get(stage + 1) if known is not None else None
        stages.append(
            {
                "stage": stage,
                "rank": schedule.rank_of[stage],
                "begins_before": cut.splits[stage - 1] if stage else None,
                "parameters": sum(staged.skeleton.get_parameter(name).numel() for name in names),
                "state_bytes": sum(state_bytes(staged.skeleton.get_parameter(name)) for name in names),
                "sent_bytes": boundary.num_bytes if boundary is not None else None,
                "counts": counts[stage] if counts is not None else None,
            }
        )
    return {
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "csv": schedule.to_csv(),
        "length": schedule.length,
        "bubble": schedule.bubble,
        "peak": list(schedule.peak),
        "rows": {name: list(v.shape) for name, v in batch.items() if hasattr(v, "shape")},
        "stages": stages,
        "stopped": stopped,
    }


def _rows(found: dict[str, Any]) -> list[list[str]]:
    rows = []
    for stage in found["stages"]:
        counts = stage["counts"] or {}
        sent = "" if stage["sent_bytes"] is None else bytes_text(stage["sent_bytes"])
        rows.append(
            [
                str(stage["stage"]),
                str(stage["rank"]),
                stage["begins_before"] or "(the model)",
                f"{stage['parameters']:,}",
                bytes_text(stage["state_bytes"]),
                sent,
                *(str(counts.get(name, "")) for name in _HEAD[6:]),
            ]
        )
    return rows


def print_pipeline(console: Console, staged: StagedProgram | None, found: dict[str, Any] | None) -> None:
    """``found``: of :func:`pipeline_as_dict`."""
    if found is None or staged is None:
        console.print("no pipeline")
        return
    if found["rows"]:
        shapes = [f"{name} " + "x".join(map(str, shape)) for name, shape in found["rows"].items()]
        console.print(f"for a batch of {', '.join(shapes)}")
    table = new_table(*_HEAD, right=("stage", "rank", *_HEAD[3:]))
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(_NOTE)
    if found["stopped"]:
        console.print(f"messages between stages are not known: {found['stopped']}")
    console.print(
        f"{found['schedule']}, {found['microbatches']} micro-batches: a rank is idle for {found['bubble']:.1%} of a "
        f"step; held forwards by rank: {', '.join(map(str, found['peak']))}"
    )
    print(staged.schedule.draw(console.width), end="")


def write_page(file: str, staged: StagedProgram | None, found: dict[str, Any] | None) -> None:
    """The schedule as one HTML file. Raises ValueError without a pipeline."""
    from vescale.pipeline import schedule_page

    if found is None or staged is None:
        raise ValueError("--html draws the schedule of a pipeline, but the plan has none")
    page = schedule_page(staged.schedule, f"Schedule {found['schedule']}", _HEAD, _rows(found), _NOTE)
    Path(file).write_text(page, encoding="utf-8")
