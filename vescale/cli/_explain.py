"""``vescale explain``: a plan for a model, from entries to instructions, hooks and predicted collectives."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vescale.cli._console import bytes_text, new_console, new_table, print_json, working
from vescale.cli._inputs import (
    MODEL_HELP,
    PLAN_HELP,
    add_inputs,
    add_json,
    add_mesh,
    inputs_of,
    load_model,
    load_plan,
    parse_mesh,
)
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from torch import nn

    from vescale.estimation import Collective, Prediction
    from vescale.ir import Program, UnitBucket
    from vescale.pipeline import StagedProgram
    from vescale.plans import Plan


_PHASES = {"forward": "fwd", "backward": "bwd"}
_SECTIONS = ("memory", "collectives", "plan", "units", "checkpoints", "pipeline", "hooks", "ir")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add_mesh(parser)
    add_inputs(parser)
    parser.add_argument("--only", choices=_SECTIONS, metavar="SECTION", help=f"show one of {', '.join(_SECTIONS)}")
    parser.add_argument("--html", metavar="FILE", help="draw the schedule of the plan's pipeline in an HTML file")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run some steps of the first rank in this process, with tensors of its local sizes, and show the host "
        "time of each part",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: explained; 1: the plan does not fit the model."""
    with working("loading torch"):
        from vescale.estimation import predict
        from vescale.ir import lower
        from vescale.plans import PlanError

    model, mesh = load_model(args.model), parse_mesh(args.mesh)
    try:
        plan = load_plan(args.plan, mesh)
        program = lower(plan, model)
        staged = None
        if plan.pipeline_entry is not None:
            from vescale.pipeline import StagedProgram

            staged = StagedProgram.of(plan, model, program)
    except PlanError as error:
        return _refused(error, args.json)
    inputs = inputs_of(model, args)
    if args.profile:
        return _print_profile(model, plan, inputs, args.json)
    with working("running a step without numbers"):
        prediction = predict(model, plan, inputs, program) if inputs else None
    pipeline = (
        pipeline_as_dict(staged, inputs, prediction)
        if args.html or args.json or args.only in (None, "pipeline")
        else None
    )
    if args.html:
        try:
            write_page(args.html, staged, pipeline)
        except (ValueError, OSError) as error:
            return _refused(error, args.json)
    if args.json:
        uneven = [row._asdict() for row in _uneven_rows(program, model, inputs)]
        print_json(_as_dict(plan, program, model, prediction) | {"uneven_cuts": uneven, "pipeline": pipeline})
        return 0
    console = new_console()
    sections: dict[str, Any] = {
        "memory": lambda: _print_memory(console, program, model, inputs),
        "collectives": lambda: _print_collectives(console, prediction, inputs),
        "plan": lambda: _print_plan(console, plan),
        "units": lambda: _print_units(console, program, model),
        "checkpoints": lambda: _print_checkpoints(console, program),
        "pipeline": lambda: print_pipeline(console, staged, pipeline),
        "hooks": lambda: _print_hooks(console, program),
        "ir": lambda: _print_instructions(console, program),
    }
    if staged is None and args.only is None:
        del sections["pipeline"]
    for number, (name, section) in enumerate(sections.items()):
        if args.only in (None, name):
            if args.only is None:
                console.print("\n" * bool(number) + _title(name, plan, args), style="bold")
            section()
    return 0


def _refused(error: Exception, as_json: bool) -> int:
    if as_json:
        print_json({"error": str(error)})
    else:
        new_console().print(str(error))
    return 1


def _title(section: str, plan: Plan, args: argparse.Namespace) -> str:
    return {
        "plan": f"Plan {args.plan}: {len(plan)} entries on {plan.axes}",
        "ir": "Instructions (path.hook:target:index:op; repeated layers merged)",
        "hooks": "Hooks (modules with a hook, and the number of instructions that each runs)",
        "units": "Units (gathered for a forward and backward; bytes that a rank exchanges with others in one "
        "collective)",
        "checkpoints": "Forwards that are recomputed in backward (repeated layers merged)",
        "memory": "Parameters and buffers, and uneven shards",
        "collectives": "Predicted collectives of one step (bytes that a rank exchanges with others)",
        "pipeline": "Stages and their schedule (a forward takes one unit of time, a backward two)",
    }[section]


# Sections


def _print_plan(console: Console, plan: Plan) -> None:
    table = new_table("entry", "where", "placements", "phase", "line", right=("line",))
    for entry in plan.entries:
        kind = type(entry).__name__.removesuffix("Entry").lower()
        source = entry.source
        table.add_row(
            kind,
            entry.path.text,
            _entry_text(entry),
            _phase_text(entry),
            str(source.line) if source is not None else "",
        )
    console.print(table)


def _entry_text(entry: Any) -> str:
    from vescale.plans import placement_text

    def text(placements: Iterable[tuple[str, Any]]) -> str:
        return ", ".join(f"{axis}={placement_text(placement)}" for axis, placement in placements)

    if hasattr(entry, "budget_gib"):
        return entry.policy.text() + ("" if entry.budget_gib is None else f", budget {entry.budget_gib:g} GiB")
    if hasattr(entry, "methods"):
        return ", ".join(f"{axis}={method}" for axis, method in entry.methods)
    if hasattr(entry, "placements"):
        return text(entry.placements) + (" given=local" if getattr(entry, "given", "") == "local" else "")
    if hasattr(entry, "src"):
        return f"{text(entry.src)} -> {text(entry.dst)}"
    return ", ".join(part for part in (getattr(entry, "kind", None), getattr(entry, "dispatch", None)) if part)


def _phase_text(entry: Any) -> str:
    from vescale.plans import ALL, phase_text

    return phase_text(entry.phase) if getattr(entry, "phase", ALL) != ALL else ""


def _print_instructions(console: Console, program: Program) -> None:
    for line in program.to_text(merge_layers=True).splitlines():
        console.print(line)


def _print_hooks(console: Console, program: Program) -> None:
    table = new_table("module", "hook", "instructions", "modules", right=("instructions", "modules"))
    for path, hook, instructions, count in _hooks(program):
        table.add_row(path or "(the model)", hook, str(instructions), str(count))
    console.print(table)


def _hooks(program: Program) -> list[tuple[str, str, int, int]]:
    """(module, hook, instructions that it runs, number of modules), repeated layers merged."""
    from vescale.ir import Hook, merge_repeats

    counts = Counter((i.path, i.hook) for i in program if i.hook is not Hook.INIT)
    merged = merge_repeats((path, (hook.value, number)) for (path, hook), number in counts.items())
    return [(path, hook, number, modules) for path, (hook, number), modules in merged]


def _units(program: Program, model: nn.Module) -> list[tuple[str, UnitBucket, int]]:
    """Buffers of units, repeated ones as one, with their number."""
    from dataclasses import replace

    from vescale.ir import merge_repeats, unit_buckets

    rows = ((b.path, replace(b, path="", names=("",) * len(b.names))) for b in unit_buckets(program, model))
    return [(path, bucket, count) for path, bucket, count in merge_repeats(rows)]


def _print_units(console: Console, program: Program, model: nn.Module) -> None:
    found = _units(program, model)
    if not found:
        console.print("none: no parameter is sharded at rest and whole during computation")
        return
    numbers = ("params", "padding", "at rest", "gathered", "gather", "again", "reduce", "replicas", "number")
    table = new_table("unit", "over", "dtype", *numbers, right=numbers)
    for path, bucket, count in found:
        moved = {(when, op): num_bytes for when, op, _, num_bytes in bucket.collectives}
        over = ",".join((*bucket.replicate, *bucket.shard))
        keys = (("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter"))
        sizes = [bytes_text(moved[key]) if key in moved else "-" for key in (*keys, ("backward", "all_reduce"))]
        padding = f"{bucket.padding_elements / max(1, bucket.num_elements):.2%}"
        held = (bytes_text(bucket.resting_bytes), bytes_text(bucket.whole_bytes))
        dtype = str(bucket.dtype).removeprefix("torch.")
        row = (path or "(the model)", over, dtype, str(len(bucket.names)), padding, *held, *sizes, str(count))
        table.add_row(*row)
    console.print(table)


def _checkpoint_rows(program: Program) -> list[dict[str, Any]]:
    """A row for each module, repeated layers merged: what it saves, whether collectives in it run again, its budget."""
    from vescale.ir import Checkpoint, merge_repeats

    found = ((i.path, i.op) for i in program if isinstance(i.op, Checkpoint))
    return [
        {
            "module": path,
            "policy": op.policy.text(),
            "communication": _communication(op.policy.kind, op.policy.recompute_communication),
            "budget_gib": op.budget_gib,
            "modules": count,
        }
        for path, op, count in merge_repeats(found)
    ]


def _communication(kind: str, again: bool) -> str:
    return "as without" if kind == "offload" else "again" if again else "results saved"


def _print_checkpoints(console: Console, program: Program) -> None:
    rows = _checkpoint_rows(program)
    if not rows:
        console.print("none: each forward saves what its backward needs")
        return
    table = new_table("module", "saved for backward", "communication", "budget", "modules", right=("budget", "modules"))
    for row in rows:
        saved = {"full": "inputs", "offload": "everything, on the host"}.get(row["policy"], f"inputs, {row['policy']}")
        budget = "" if row["budget_gib"] is None else f"{row['budget_gib']:g} GiB"
        table.add_row(row["module"], saved, row["communication"], budget, str(row["modules"]))
    console.print(table)
    if any(row["budget_gib"] is not None for row in rows):
        console.print(
            "modules with a budget save more if it allows that: this is decided after the first step (see "
            "vescale.report(model))"
        )


def _memory(program: Program, model: nn.Module) -> dict[str, int]:
    """Bytes of parameters and buffers: of the model, and the most that a rank holds at rest."""
    from vescale.ir import Place, join_placements, ragged_positions, unit_buckets
    from vescale.placements import local_region, normalize_placements

    axes, total, local = program.axes, 0, 0
    for instruction in program:
        if not isinstance(instruction.op, Place):
            continue
        tensor = getattr(model.get_submodule(instruction.path), instruction.target)
        placements = [placement for placement in instruction.op.placements if placement is not None]
        shape = tuple(tensor.shape)
        placed, sizes = join_placements(placements, axes.sizes, ragged_positions(placements))
        resolved = normalize_placements(placed, shape, sizes)
        region = local_region(shape, resolved, sizes, (0,) * len(sizes))
        total += tensor.numel() * tensor.element_size()
        local += region.numel * tensor.element_size()
    buckets = unit_buckets(program, model)
    gathered = sum(b.whole_bytes for b in buckets if not b.path) + max(
        (b.whole_bytes for b in buckets if b.path and b.backward_ranks > 1), default=0
    )
    gathered += sum(b.whole_bytes for b in buckets if b.path and b.backward_ranks == 1)
    return {"model_bytes": total, "first_rank_bytes": local, "gathered_bytes": gathered}


def _print_memory(console: Console, program: Program, model: nn.Module, inputs: dict[str, Any]) -> None:
    memory = _memory(program, model)
    console.print(
        f"{bytes_text(memory['model_bytes'])} in all, {bytes_text(memory['first_rank_bytes'])} on the first rank between "
        "steps"
    )
    rows = _uneven_rows(program, model, inputs)
    if rows:
        console.print(_uneven_table(rows))
    if memory["gathered_bytes"]:
        console.print(
            f"{bytes_text(memory['gathered_bytes'])} more during a step: gathered parameters of the units that stay whole, "
            "and of the largest other unit (of the two largest, if gathers overlap with computation)"
        )


def _print_collectives(console: Console, prediction: Prediction | None, inputs: dict[str, Any]) -> None:
    if prediction is None:
        console.print("not predicted: the shapes of the inputs are not known; pass --input NAME=SHAPE[:DTYPE]")
        return
    shapes = [f"{name} {'x'.join(map(str, value.shape))}" for name, value in inputs.items() if hasattr(value, "shape")]
    console.print(f"for {', '.join(shapes)}")
    table = new_table("tensor", "phase", "axis", "op", "calls", "bytes", right=("calls", "bytes"))
    for path, collective, count in _merged(prediction):
        name = f"{path}.{collective.target}" if path else collective.target
        size = bytes_text(collective.num_bytes * count)
        table.add_row(name, _PHASES[collective.when], collective.axis, collective.op, str(count), size)
    console.print(_totals_table(prediction))
    console.print()
    console.print(table)
    if prediction.stopped is not None:
        console.print(f"the step stopped before its end, and what follows is missing: {prediction.stopped}")
    console.print(
        "Seen in a step of the first and the last rank without numbers; tokens are routed to all experts alike. "
        "Gradients are listed one by one, but reduced in buckets."
    )
    if prediction.buckets:
        console.print()
        console.print(_buckets_table(prediction))


def _buckets_table(prediction: Prediction) -> Any:
    """Each bucket's axes, bytes and cost by the ring model, beside a reduction axis by axis."""
    table = new_table(
        "bucket",
        "gradients",
        "axes",
        "op",
        "size",
        "bytes",
        "axis by axis",
        "predicted",
        right=("bucket", "gradients", "size", "bytes", "axis by axis", "predicted"),
    )
    for number, bucket in enumerate(prediction.buckets):
        table.add_row(
            str(number),
            str(len(bucket.names)),
            ",".join(bucket.axes),
            " + ".join(op for op, _, _ in bucket.collectives),
            bytes_text(bucket.num_bytes),
            bytes_text(bucket.cost.num_bytes),
            bytes_text(bucket.per_axis_bytes),
            f"{bucket.cost.seconds * 1e3:.2f} ms",
        )
    return table


def _merged(prediction: Prediction) -> list[tuple[str, Collective, int]]:
    """Collectives of repeated layers as one, with their number; those of equal rows add up."""
    from dataclasses import replace

    from vescale.ir import merge_repeats

    rows = ((collective.path, replace(collective, path="")) for collective in prediction.one_by_one)
    return [(path, collective, count) for path, collective, count in merge_repeats(rows)]


def _totals(prediction: Prediction) -> list[dict[str, Any]]:
    """Calls as they are made: gradients in buckets."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for collective in prediction.made:
        totals.setdefault((collective.axis, collective.when, collective.op), []).append(collective.num_bytes)
    return [
        {"axis": axis, "when": when, "op": op, "calls": len(found), "bytes": sum(found)}
        for (axis, when, op), found in sorted(totals.items())
    ]


def _totals_table(prediction: Prediction) -> Any:
    table = new_table("axis", "phase", "op", "calls", "bytes", right=("calls", "bytes"))
    for row in _totals(prediction):
        table.add_row(row["axis"], _PHASES[row["when"]], row["op"], str(row["calls"]), bytes_text(row["bytes"]))
    return table


def _as_dict(plan: Plan, program: Program, model: nn.Module, prediction: Prediction | None) -> dict[str, Any]:
    import json

    data: dict[str, Any] = {
        "mesh": dict(zip(plan.axes.names, plan.axes.sizes)),
        "entries": len(plan),
        "program": json.loads(program.to_json())["instructions"],
        "hooks": [
            {"module": path, "hook": hook, "instructions": number, "modules": modules}
            for path, hook, number, modules in _hooks(program)
        ],
        "units": [
            {
                "unit": path,
                "shard": list(bucket.shard),
                "replicate": list(bucket.replicate),
                "parameters": len(bucket.names),
                "padding_elements": bucket.padding_elements,
                "resting_bytes": bucket.resting_bytes,
                "whole_bytes": bucket.whole_bytes,
                "gradient_bytes": bucket.gradient_bytes,
                "collectives": [
                    {"when": when, "op": op, "axis": axis, "bytes": num_bytes}
                    for when, op, axis, num_bytes in bucket.collectives
                ],
                "units": count,
            }
            for path, bucket, count in _units(program, model)
        ],
        "checkpoints": _checkpoint_rows(program),
        "memory": _memory(program, model),
        "collectives": None,
    }
    if prediction is not None:
        data["collectives"] = {
            "stopped": prediction.stopped,
            "totals": _totals(prediction),
            "buckets": [
                {
                    "gradients": list(bucket.names),
                    "axes": list(bucket.axes),
                    "ops": [op for op, _, _ in bucket.collectives],
                    "size_bytes": bucket.num_bytes,
                    "bytes": bucket.cost.num_bytes,
                    "axis_by_axis_bytes": bucket.per_axis_bytes,
                    "seconds": bucket.cost.seconds,
                }
                for bucket in prediction.buckets
            ],
            "by_module": [
                {
                    "module": path,
                    "tensor": c.target,
                    "when": c.when,
                    "axis": c.axis,
                    "op": c.op,
                    "calls": count,
                    "bytes_each": c.num_bytes,
                }
                for path, c, count in _merged(prediction)
            ],
        }
    return data


class _UnevenRow(NamedTuple):
    """A parameter, buffer or input; ``sizes`` by rank of ``axis``; ``number`` of repeated layers that have it alike."""

    name: str
    dim: int
    axis: str
    sizes: tuple[int, ...]
    number: int


def _uneven_rows(program: Program, model: nn.Module, inputs: Mapping[str, Any]) -> list[_UnevenRow]:
    """Of ``inputs``, whole tensors by name, then of the model's parameters and buffers."""
    from vescale.ir import merge_repeats, uneven_cuts, uneven_inputs

    found = [_UnevenRow(cut.name, cut.dim, cut.axis, cut.sizes, 1) for cut in uneven_inputs(program, model, inputs)]
    rows = ((cut.name, (cut.dim, cut.axis, cut.sizes)) for cut in uneven_cuts(program, model))
    return found + [
        _UnevenRow(name, dim, axis, sizes, count) for name, (dim, axis, sizes), count in merge_repeats(rows)
    ]


def _uneven_table(rows: Sequence[_UnevenRow]) -> Any:
    table = new_table("uneven shards", "dim", "over", "sizes by rank", "number", right=("dim", "number"))
    for row in rows:
        table.add_row(row.name, str(row.dim), row.axis, _runs(row.sizes), str(row.number))
    return table


def _runs(sizes: Sequence[int]) -> str:
    """``3, 3, 3, 1`` as ``3 x 3, 1``: how many ranks, and what each of them holds."""
    groups = [(size, len(list(group))) for size, group in itertools.groupby(sizes)]
    return ", ".join(f"{count} x {size:,}" if count > 1 else f"{size:,}" for size, count in groups)


def _print_profile(model: nn.Module, plan: Plan, inputs: Mapping[str, Any], as_json: bool) -> int:
    """0: profiled. Raises UsageError for what cannot be profiled."""
    from vescale.debug import profile_host
    from vescale.errors import DebugOptionError

    if not inputs:
        raise UsageError(
            "--profile runs the forward, but the shapes of its inputs are not known; pass --input NAME=SHAPE[:DTYPE]"
        )
    try:
        with working("running some steps"):
            found = profile_host(model, plan, inputs)
    except DebugOptionError as error:
        raise UsageError(f"--profile: {error}") from None
    if as_json:
        ops = [{**vars(op), "fallbacks": dict(op.fallbacks)} for op in found.dispatch.ops]
        times = ("first_step_seconds", "forward_seconds", "backward_seconds")
        print_json({name: getattr(found, name) for name in times} | {"is_native": found.dispatch.is_native, "ops": ops})
        return 0
    console = new_console()
    console.print(
        f"A step of the first rank takes {_ms(found.forward_seconds + found.backward_seconds)} of processor time "
        f"(forward {_ms(found.forward_seconds)}, backward {_ms(found.backward_seconds)}), the first one "
        f"{_ms(found.first_step_seconds)}; collectives cost nothing here"
    )
    print(found.dispatch)
    return 0


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


# The section about a pipeline: stages, what they send, and the schedule.


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
