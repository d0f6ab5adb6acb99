"""``vescale zoo``: the plans that ship with the library, and those that Hugging Face models carry."""

from __future__ import annotations

import argparse
import textwrap
import warnings

from vescale.cli._console import new_console, new_table, print_json
from vescale.cli._inputs import CONFIG_HELP, add_json, add_mesh, config_file, load_model, parse_mesh
from vescale.cli._main import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("list", help="list the names, axes and purpose of the plans (default)")
    show = actions.add_parser("show", help="print the YAML of a plan, to read or to copy")
    show.add_argument("name", metavar="NAME")
    read = actions.add_parser("import", help="print the plan that a Hugging Face model carries, as YAML to edit")
    read.add_argument("model", metavar="CONFIG", help=CONFIG_HELP)
    add_mesh(read)
    read.add_argument("--axis", default="tp", help="axis of tensor parallelism (default: tp)")
    read.add_argument(
        "--expert-axis", metavar="AXIS", help="axis over which whole experts are distributed (default: none)"
    )
    read.add_argument("--sequence-parallel", action="store_true", help="shard the sequence between the parts of layers")
    add_json(parser)
    for action in (listing, show, read):
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")


def run(args: argparse.Namespace) -> int:
    from vescale import plan_zoo

    if args.action == "show":
        try:
            text = plan_zoo.path_of(args.name).read_text(encoding="utf-8")
        except ValueError as error:  # a PlanError, whose class needs torch
            raise UsageError(str(error)) from None
        if args.json:
            print_json({"name": args.name, "yaml": text})
        else:
            print(text, end="")
        return 0
    if args.action == "import":
        return _import(args)
    about = [plan_zoo.about(name) for name in plan_zoo.names()]
    if args.json:
        print_json([{"name": one.name, "axes": list(one.axes), "description": one.description} for one in about])
        return 0
    table = new_table("plan", "axes", "description")
    for one in about:
        table.add_row(one.name, ", ".join(one.axes), one.description)
    new_console().print(table)
    return 0


def _import(args: argparse.Namespace) -> int:
    """The plan of a model on the meta device, with a comment on how much of the model it places."""
    from vescale.ir import coverage
    from vescale.plans import HfImportWarning, Plan, PlanError

    if config_file(args.model) is None:
        raise UsageError(f"zoo import {args.model}: expected {CONFIG_HELP}")
    mesh = parse_mesh(args.mesh or f"dp=1,{args.axis}=2")
    assert mesh is not None
    model = load_model(args.model)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        try:
            plan = Plan.from_hf(
                model,
                mesh,
                args.axis,
                expert_axis=args.expert_axis,
                sequence_parallel=args.sequence_parallel,
            )
        except PlanError as error:
            raise UsageError(str(error)) from None
    found = coverage(plan, model)
    notes = [str(note.message) for note in noted if issubclass(note.category, HfImportWarning)]
    if args.json:
        shares = {"parameters": found.parameters, "activations": found.activations, "whole": dict(found.whole)}
        print_json({"yaml": plan.to_yaml(), "coverage": shares, "notes": notes})
        return 0
    for line in (f"{type(model).__name__}: {found}", *notes):
        print(textwrap.fill(line, 120, initial_indent="# ", subsequent_indent="#   ", break_long_words=False))
    print(plan.to_yaml(), end="")
    return 0
