"""``vescale zoo``: the plans that ship with the library."""

from __future__ import annotations

import argparse

from vescale.cli._console import new_console, new_table, print_json
from vescale.cli._inputs import add_json
from vescale.cli._main import UsageError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="names, axes and what each plan is for (the default)")
    show = actions.add_parser("show", help="print the YAML of a plan, to read or to copy")
    show.add_argument("name", metavar="NAME")
    add_json(parser)
    for action in (listing, show):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    from vescale import plan_zoo
    from vescale.plans import PlanError

    if args.action == "show":
        try:
            text = plan_zoo.path_of(args.name).read_text(encoding="utf-8")
        except PlanError as error:
            raise UsageError(str(error)) from None
        if args.json:
            print_json({"name": args.name, "yaml": text})
        else:
            print(text, end="")
        return 0
    about = [plan_zoo.about(name) for name in plan_zoo.names()]
    if args.json:
        print_json([{"name": one.name, "axes": list(one.axes), "description": one.description} for one in about])
        return 0
    table = new_table("plan", "axes", "description")
    for one in about:
        table.add_row(one.name, ", ".join(one.axes), one.description)
    new_console().print(table)
    return 0
