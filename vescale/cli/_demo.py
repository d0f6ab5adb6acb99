"""``vescale demo``: a Llama on real text, on a mesh of local processes and on one device, side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from vescale.cli._demo_chart import loss_chart
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from vescale.cli._demo_job import Collective, Job

__all__ = ["add_arguments", "run"]


_PRELOAD = (
    "vescale.runtime",
    "transformers.models.llama.modeling_llama",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="training steps (default: 40)")
    parser.add_argument(
        "--mesh",
        default="dp=2,tp=2",
        metavar="AXES",
        help="sizes of the axes dp and tp; one that is left out has one rank (default: dp=2,tp=2)",
    )
    parser.add_argument(
        "--plan", default="llama", metavar="NAME", help="llama, or llama_zero3: parameters in parts (default: llama)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write loss.svg, report.json and the program (the IR) there"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        metavar="REL",
        help="largest relative difference of a loss that float32 additions in another order explain (default: 1e-4)",
    )


@dataclass
class Result:
    """The results of the two runs."""

    job: Job
    tolerance: float
    one_device: dict[int, float] = field(default_factory=dict)
    mesh: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    program: str = ""

    @property
    def differences(self) -> list[float]:
        """Relative, of each step; infinite for a loss that is no number."""
        pairs = ((self.one_device[step], self.mesh[step]) for step in sorted(self.mesh))
        found = [abs(b - a) / abs(a) for a, b in pairs]
        return [d if math.isfinite(d) else math.inf for d in found]

    @property
    def equal(self) -> bool:
        return max(self.differences) <= self.tolerance

    @property
    def mesh_name(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.job.axes)

    def to_json(self) -> dict[str, Any]:
        steps = [
            {"step": step, "one_device": self.one_device[step], "mesh": self.mesh[step], "relative_difference": d}
            for step, d in zip(sorted(self.mesh), self.differences)
        ]
        return {
            "mesh": dict(self.job.axes),
            "plan": f"plan_zoo/{self.job.plan}.yaml",
            "steps": steps,
            "largest_relative_difference": max(self.differences),
            "tolerance": self.tolerance,
            "collectives_per_step": [collective.to_json() for collective in self.collectives],
            "verdict": "equal" if self.equal else "different",
        }


def run(args: argparse.Namespace) -> int:
    """Exit code 0: the losses agree; 1: they differ, or a process failed; 2: bad usage."""
    job = _job(args)
    from vescale.debug import ProcessFailed

    console = Console(stderr=args.json)
    begin = time.perf_counter()
    try:
        result = _train(job, args.tolerance, console)
    except ProcessFailed as failure:
        print(f"vescale demo: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("vescale demo: interrupted; all processes have ended", file=sys.stderr)
        return 130
    if args.out is not None:
        _write(args.out, result)
    if args.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        _show(console, result, args.out, time.perf_counter() - begin)
    return 0 if result.equal else 1


def _job(args: argparse.Namespace) -> Job:
    """The validated job: all errors are raised before a process starts."""
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: train at least one step")
    import torch

    from vescale import plan_zoo
    from vescale.cli._demo_job import Job, make_model
    from vescale.ir import lower
    from vescale.plans import MeshAxes, PlanError

    try:
        name = args.plan.replace("-", "_")
        given = MeshAxes.parse(args.mesh)
        wanted = plan_zoo.about(name).axes
        unknown = [axis for axis in given if axis not in wanted]
        if unknown:
            raise ValueError(f"the plan has no axis {unknown[0]!r}; give sizes of {', '.join(wanted)}")
        missing = {axis: 1 for axis in wanted if axis not in given}
        axes = MeshAxes.of({**dict(zip(given.names, given.sizes)), **missing})
        job = Job(axes=tuple(zip(axes.names, axes.sizes)), num_steps=args.steps, plan=name)
        with torch.device("meta"):
            model = make_model(job)
        lower(plan_zoo.load(name, axes), model)
    except (ValueError, PlanError) as error:
        raise UsageError(f"--mesh {args.mesh} --plan {args.plan}: {error}") from None
    except ImportError as error:
        needed = "pip install 'transformers>=5' tokenizers safetensors"
        raise UsageError(f"{error}; install what the demo needs: {needed}") from None
    if math.prod(axes.sizes) > 16:
        raise UsageError(f"--mesh {args.mesh} is {math.prod(axes.sizes)} local processes; use 16 or fewer")
    return job


def _work(job: Job, rank: int, send: Any) -> None:
    from vescale.cli._demo_job import train_mesh, train_one_device

    if rank < 0:
        train_one_device(job, send)
    else:
        train_mesh(job, rank, send)


def _train(job: Job, tolerance: float, console: Console) -> Result:
    import numpy as np

    from vescale.cli._demo_job import tokens_of_topics
    from vescale.debug import messages

    result = Result(job, tolerance)
    num_ranks = math.prod(size for _, size in job.axes)
    with tempfile.TemporaryDirectory(prefix="vescale-demo-") as folder, _progress(console) as progress:
        reading = progress.add_task("reading Python's manual", total=1)
        tokens = tokens_of_topics(job.vocab_size)
        job = replace(job, tokens=os.path.join(folder, "tokens.npy"))
        np.save(job.tokens, tokens)
        progress.update(reading, completed=1, description=f"{len(tokens):,} tokens of English")
        bars = {
            True: progress.add_task("one device", total=job.num_steps),
            False: progress.add_task(f"{num_ranks} ranks, {result.mesh_name}", total=job.num_steps),
        }
        with contextlib.closing(messages(_work, num_ranks, job, preload=_PRELOAD)) as received:
            for rank, (kind, *values) in received:
                if kind == "step":
                    step, loss, seconds = values
                    (result.one_device if rank < 0 else result.mesh)[step] = loss
                    if rank >= 0:
                        result.seconds[step] = seconds
                    progress.update(bars[rank < 0], completed=step + 1)
                elif kind == "collectives":
                    result.collectives = values[0]
                elif kind == "program":
                    result.program = values[0]
    return result


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress


def _write(folder: Path, result: Result) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    one_device, mesh = ([losses[step] for step in sorted(losses)] for losses in (result.one_device, result.mesh))
    chart = loss_chart(one_device, mesh, result.mesh_name, max(result.differences))
    (folder / "loss.svg").write_text(chart)
    (folder / "program.txt").write_text(result.program)
    (folder / "report.json").write_text(json.dumps(result.to_json(), indent=2) + "\n")


def _show(console: Console, result: Result, out: Path | None, seconds: float) -> None:
    losses = Table(title="Loss of each step", title_justify="left")
    for name in ("step", "one device", result.mesh_name, "relative difference"):
        losses.add_column(name, justify="right")
    for step, difference in zip(sorted(result.mesh), result.differences):
        style = "" if difference <= result.tolerance else "red"
        row = (str(step), f"{result.one_device[step]:.6f}", f"{result.mesh[step]:.6f}", f"{difference:.1e}")
        losses.add_row(*row, style=style)
    console.print(losses)
    comms = Table(title="Collectives of one step (rank 0)", title_justify="left")
    for name in ("axis", "op", "for"):
        comms.add_column(name)
    comms.add_column("count", justify="right")
    comms.add_column("bytes", justify="right")
    for c in result.collectives:
        comms.add_row(c.axis, c.op, c.purpose, str(c.count), f"{c.bytes:,}")
    console.print(comms)
    worst = max(result.differences)
    found = f"largest relative difference {worst:.1e} over {len(result.mesh)} steps (allowed: {result.tolerance:.0e})"
    if result.equal:
        console.print(f"[bold green]EQUAL[/]: {found}; no communication that the plan did not ask for; {seconds:.0f} s")
    else:
        console.print(f"[bold red]DIFFERENT[/]: {found}; {seconds:.0f} s")
    if out is not None:
        console.print(f"written: {out / 'loss.svg'}, {out / 'report.json'}, {out / 'program.txt'}")
