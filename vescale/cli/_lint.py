"""``vescale lint``: errors and warnings about a plan for a model, before anything runs."""

from __future__ import annotations

import argparse
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vescale.cli._console import new_console, print_json, working
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
from vescale.cli._optimizer_rule import add_optimizer, block_findings, parse_optimizer
from vescale.cli._plan_fix import fix_plan

if TYPE_CHECKING:
    from torch import nn

    from vescale.ir import Finding
    from vescale.plans import Plan

_ROWS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add_mesh(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="omit the warnings of a rule; may be repeated"
    )
    add_optimizer(parser)
    parser.add_argument(
        "--fix",
        action="store_true",
        help="write entries for implicit communication into PLAN (a file): those that keep the plan valid and reduce "
        "its implicit communication",
    )
    add_inputs(parser, None, 128, "default: 8, or more, so that all ranks get the same number of rows")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: nothing found; 1: findings."""
    with working("loading torch"):
        from vescale.errors import EntryError
        from vescale.estimation import forward_reports
        from vescale.ir import Finding
        from vescale.plans import PlanError

    model, mesh = load_model(args.model), parse_mesh(args.mesh)
    rule = parse_optimizer(args.optimizer)
    file = Path(args.plan)
    if args.fix and not file.is_file():
        raise UsageError(
            f"--fix writes into a file, but {args.plan!r} is not one; `vescale zoo {args.plan}` prints a plan"
        )
    fixed: list[str] = []
    note = ""
    try:
        plan = load_plan(args.plan, mesh)
        if args.batch is None:
            args.batch = _rows(plan)
        inputs = inputs_of(model, args)
        with working("tracing the forward"):
            found = _check(plan, model, inputs)
            if inputs and not any(finding.severity == "error" for finding in found):
                look = functools.partial(forward_reports, model, inputs=inputs)
                try:
                    if args.fix:
                        fixed = fix_plan(file, lambda path: load_plan(str(path), mesh), look)
                        plan = load_plan(args.plan, mesh)
                        found = _check(plan, model, inputs)
                    found = (*found, *(Finding("warning", "implicit", text, None, ()) for text in look(plan)))
                except EntryError as error:
                    found = (*found, Finding("error", "unused-output", error.problem, error.source, ()))
                except Exception as error:  # code that reads values, or that takes other inputs
                    message = (str(error).splitlines() or ["no message"])[0]
                    note = f"implicit communication was not checked: {type(error).__name__}: {message}"
        if rule is not None and not any(finding.severity == "error" for finding in found):
            found = (*block_findings(plan, model, rule), *found)
    except PlanError as error:  # the plan cannot even be read
        found = (Finding("error", "plan", error.problem, error.source, ()),)
    findings = [f for f in found if f.severity == "error" or f.rule not in args.ignore]
    if args.json:
        data: dict[str, Any] = {"plan": args.plan, "model": args.model}
        data["findings"] = [_as_dict(finding) for finding in findings]
        print_json({**data, **({"fixed": fixed} if args.fix else {}), **({"note": note} if note else {})})
    else:
        _print(findings, fixed, note)
    return 1 if findings else 0


def _check(plan: Plan, model: nn.Module, inputs: dict[str, Any]) -> tuple[Finding, ...]:
    if plan.pipeline_entry is None:
        from vescale.ir import check

        return check(plan, model, inputs)
    from vescale.pipeline import check_stages

    return check_stages(plan, model, inputs)


def _rows(plan: Plan) -> int:
    """At least 8, the same for each of the ranks that cut the batch: uneven rows communicate where even ones do not."""
    ranks = 1
    if any(_ROWS % size for size in plan.axes.sizes) or math.prod(plan.axes.sizes) > _ROWS:
        from vescale.estimation import batch_axes

        ranks = math.prod(map(plan.axes.size, batch_axes(plan)))
    return ranks * math.ceil(_ROWS / ranks)


def _as_dict(finding: Finding) -> dict[str, Any]:
    data: dict[str, Any] = {"severity": finding.severity, "rule": finding.rule, "problem": finding.problem}
    if finding.source is not None:
        data |= {"file": finding.source.file, "line": finding.source.line, "column": finding.source.column}
    return {**data, "names": list(finding.names)}


def _print(findings: list[Finding], fixed: list[str], note: str) -> None:
    from rich.text import Text

    console = new_console()
    for finding in findings:
        place = f"{finding.source}: " if finding.source is not None else ""
        style = "bold red" if finding.severity == "error" else "yellow"
        console.print(Text(place) + Text(f"{finding.severity}[{finding.rule}]", style) + Text(f": {finding.problem}"))
    for line in fixed:
        console.print(Text("written: ", "green") + Text(line))
    if note:
        console.print(note)
    errors = sum(finding.severity == "error" for finding in findings)
    if findings:
        console.print(f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}")
    else:
        console.print(Text("no findings", "green"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
