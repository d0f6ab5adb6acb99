"""``vescale lint``: errors and warnings about a plan for a model, before anything runs."""

from __future__ import annotations

import argparse
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
from vescale.cli._optimizer_rule import add_optimizer, block_findings, parse_optimizer

if TYPE_CHECKING:
    from vescale.ir import Finding

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    add_mesh(parser)
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="RULE", help="leave out warnings of a rule; may be repeated"
    )
    add_optimizer(parser)
    add_inputs(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: nothing found; 1: findings."""
    with working("loading torch"):
        from vescale.ir import Finding, check
        from vescale.plans import PlanError

    model, mesh = load_model(args.model), parse_mesh(args.mesh)
    rule = parse_optimizer(args.optimizer)
    try:
        plan = load_plan(args.plan, mesh)
        with working("tracing the forward"):
            found = check(plan, model, inputs_of(model, args))
        if rule is not None and not any(finding.severity == "error" for finding in found):
            found = (*block_findings(plan, model, rule), *found)
    except PlanError as error:  # the plan cannot even be read
        found = (Finding("error", "plan", error.problem, error.source, ()),)
    findings = [f for f in found if f.severity == "error" or f.rule not in args.ignore]
    if args.json:
        print_json({"plan": args.plan, "model": args.model, "findings": [_as_dict(finding) for finding in findings]})
    else:
        _print(findings)
    return 1 if findings else 0


def _as_dict(finding: Finding) -> dict[str, Any]:
    data: dict[str, Any] = {"severity": finding.severity, "rule": finding.rule, "problem": finding.problem}
    if finding.source is not None:
        data |= {"file": finding.source.file, "line": finding.source.line, "column": finding.source.column}
    return {**data, "names": list(finding.names)}


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    console = new_console()
    for finding in findings:
        place = f"{finding.source}: " if finding.source is not None else ""
        style = "bold red" if finding.severity == "error" else "yellow"
        console.print(Text(place) + Text(f"{finding.severity}[{finding.rule}]", style) + Text(f": {finding.problem}"))
    errors = sum(finding.severity == "error" for finding in findings)
    if findings:
        console.print(f"{_count(errors, 'error')}, {_count(len(findings) - errors, 'warning')}")
    else:
        console.print(Text("no findings", "green"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
