"""``vescale diff``: the differences of two plans, for a model or as written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vescale.cli._console import new_console, print_json
from vescale.cli._inputs import MODEL_HELP, PLAN_HELP, add_json, add_mesh, load_model, load_plan, parse_mesh
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from vescale.plans import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", metavar="PLAN1", help=PLAN_HELP)
    parser.add_argument("after", metavar="PLAN2", help=PLAN_HELP)
    parser.add_argument("--model", metavar="MODEL", help=f"compare what the plans do to this model; {MODEL_HELP}")
    add_mesh(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: equal; 1: different. A plan that cannot be read or lowered is bad input."""
    from vescale.ir import lower
    from vescale.plans import PlanError

    mesh = parse_mesh(args.mesh)
    model = load_model(args.model) if args.model is not None else None
    try:
        plans = [load_plan(text, mesh) for text in (args.before, args.after)]
        if model is None:
            return _diff_entries(plans[0], plans[1], args.json)
        before, after = (lower(plan, model) for plan in plans)
    except PlanError as error:
        raise UsageError(str(error)) from None
    difference = before.diff(after)
    if args.json:
        print_json(difference.to_dict())
    else:
        _print_lines(str(difference).splitlines())
    return 1 if difference else 0


def _diff_entries(before: Plan, after: Plan, as_json: bool) -> int:
    """Entries as lines of YAML, in any order: entries do not override each other."""
    old, new = (_entry_lines(plan) for plan in (before, after))
    removed, added = [line for line in old if line not in new], [line for line in new if line not in old]
    if as_json:
        print_json({"equal": not removed and not added, "removed": removed, "added": added})
    else:
        _print_lines([*(f"- {line}" for line in removed), *(f"+ {line}" for line in added)])
    return 1 if removed or added else 0


def _entry_lines(plan: Plan) -> list[str]:
    """Every entry on a line of its own, ``section path: value``."""
    from vescale.plans import Plan as PlanClass

    lines = [f"mesh {plan.axes}"]
    for entry in plan.entries:
        alone = PlanClass(plan.axes)
        alone.add(entry)
        section, text = alone.to_yaml().splitlines()[2:4]
        lines.append(f"{section.removesuffix(':')} {text.strip()}")
    return lines


def _print_lines(lines: Sequence[str]) -> None:
    from rich.text import Text

    console = new_console()
    styles = {"-": "red", "+": "green", "~": "yellow"}
    for line in lines:
        console.print(Text(line, styles.get(line[0], "")))
    if not lines:
        console.print(Text("no differences", "green"))
