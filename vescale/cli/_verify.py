"""``vescale verify``: the same model on one device and on meshes of local ranks, compared value by value."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vescale.cli._console import new_console, print_json, working
from vescale.cli._inputs import MODEL_HELP, PLAN_HELP, add_inputs, add_json, load_model, load_plan, parse_mesh
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelFactory:
    """Builds the model that a text names, with values, in any process."""

    text: str

    def __call__(self) -> nn.Module:
        return load_model(self.text, "cpu")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help=PLAN_HELP)
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--mesh", action="append", metavar="AXES", help="sizes of the mesh's axes, as dp=2,tp=2; may be repeated"
    )
    add_inputs(parser, 4, 16, "default: 4")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="number of training steps (default: 2)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the model and the inputs (default: 0)"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds until a hang is reported")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: equal on every mesh; 1: different, or a mesh failed; 2: bad usage."""
    from vescale.cli._inputs import inputs_of
    from vescale.debug import verify
    from vescale.ir import random_inputs
    from vescale.plans import PlanError

    meshes = [parse_mesh(text) for text in args.mesh or []]
    first = meshes[0] if meshes else None
    try:
        plan = load_plan(args.plan, first)
        model = load_model(args.model)
        batch = random_inputs(inputs_of(model, args), model, args.seed)
        if not batch:
            raise UsageError("the model takes no input_ids; pass its inputs, such as --input x=8x16")
        with working("training on one device and on the meshes"):
            found = verify(
                ModelFactory(args.model),
                plan,
                batch,
                [mesh for mesh in meshes if mesh is not None] or None,
                steps=args.steps,
                seed=args.seed,
                timeout=args.timeout,
            )
    except (PlanError, ValueError) as error:
        raise UsageError(str(error)) from None
    if args.json:
        print_json({"plan": args.plan, "model": args.model, **found.to_json()})
    else:
        console = new_console()
        for mesh in found.meshes:
            console.print(mesh.text(), style="green" if mesh.is_equal else "bold red")
    return 0 if found else 1
