"""``vescale plan new``: a first plan for a model, as YAML with comments, to edit."""

from __future__ import annotations

import argparse

from vescale.cli._console import print_json, working
from vescale.cli._inputs import MODEL_HELP, add_inputs, add_json, given_inputs, load_model, parse_mesh
from vescale.cli._main import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("new", help="write a first plan for any model")
    new.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    new.add_argument("--mesh", required=True, metavar="AXES", help="sizes of the mesh's axes, as dp=2,tp=4")
    new.add_argument("--sequence-parallel", action="store_true", help="shard the sequence between the parts of layers")
    new.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3), help="stage of sharded data parallelism")
    new.add_argument("--axis", default="tp", help="axis of tensor parallelism (default: tp)")
    new.add_argument("--batch-axis", action="append", metavar="AXIS", help="axis of the batch (default: dp, fsdp, ...)")
    new.add_argument("-o", "--output", metavar="FILE", help="write the plan there (default: standard output)")
    add_inputs(new)
    add_json(new)


def run(args: argparse.Namespace) -> int:
    """0: written; 2: the model cannot be traced, or the mesh does not fit."""
    with working("loading torch"):
        from vescale.ir import coverage, example_inputs, new_plan
        from vescale.plans import PlanError

    mesh = parse_mesh(args.mesh)
    assert mesh is not None
    model = load_model(args.model)
    try:
        inputs = given_inputs(args) or example_inputs(model, args.batch, args.seq)
        with working("tracing the forward"):
            plan = new_plan(
                model,
                mesh,
                inputs,
                sequence=args.sequence_parallel,
                zero=args.zero,
                axis=args.axis,
                batch_axes=args.batch_axis,
            )
    except PlanError as error:
        raise UsageError(str(error)) from None
    text = plan.to_yaml()
    if args.output is not None:
        try:
            with open(args.output, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UsageError(f"--output {args.output}: {error.strerror}") from None
    if args.json:
        found = coverage(plan, model)
        shares = {"parameters": found.parameters, "activations": found.activations, "whole": dict(found.whole)}
        print_json({"yaml": text, "coverage": shares, "notes": plan.head[1:]})
    elif args.output is None:
        print(text, end="")
    return 0
