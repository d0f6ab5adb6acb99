"""``vescale search``: meshes and plans for a model on a number of devices, the fastest that fit first."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

from vescale.cli._console import bytes_text, new_console, new_table, print_json
from vescale.cli._estimate import parse_load
from vescale.cli._inputs import MODEL_HELP, add_inputs, add_json, batch_of, load_model, parse_dtype
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.plan_search import Search

_SHOWN = 4  # reasons of a rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="MODEL", required=True, help=MODEL_HELP)
    parser.add_argument(
        "--devices", type=int, required=True, metavar="N", help="number of devices; every mesh uses all of them"
    )
    add_inputs(parser, None, None, "needed, unless --input is given")
    parser.add_argument(
        "--device", default="h100-80g", metavar="NAME", help="a device table (default: h100-80g), or a YAML file"
    )
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="name of the optimizer (default: adamw), or none"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="dtype of the model's parameters (default: as built)")
    parser.add_argument("--precision", metavar="DTYPE", help="dtype of the computation in every plan, such as bfloat16")
    parser.add_argument(
        "--load",
        type=parse_load,
        default=1.0,
        help="load of experts: a multiple of the mean, or the tokens of each (default: 1)",
    )
    parser.add_argument(
        "--exact", type=int, default=3, metavar="N", help="number of plans that are estimated individually (default: 3)"
    )
    parser.add_argument(
        "--margin",
        type=float,
        default=0.08,
        metavar="SHARE",
        help="share of a plan's memory that is added for fragmentation (default: 0.08)",
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="number of plans to print (default: 10)")
    parser.add_argument("--rejected", action="store_true", help="also print every choice that was rejected, and why")
    parser.add_argument("--output", metavar="FILE", help="write the fastest plan, as YAML")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: a plan fits; 1: none does; 2: wrong usage."""
    _say("loading torch")
    from vescale.plan_search import search

    model = load_model(args.model)
    batch = batch_of(model, args)
    try:
        if args.dtype is not None:
            model = model.to(parse_dtype(args.dtype))
        found = search(
            model,
            devices=args.devices,
            batch=batch,
            device=args.device,
            optimizer=args.optimizer,
            precision=args.precision,
            load=args.load,
            exact=args.exact,
            margin=args.margin,
            progress=_say,
        )
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    finally:
        _say("")
    if args.output and found.best is not None:
        try:
            with open(args.output, "w", encoding="utf-8") as file:
                file.write(found.best.plan().to_yaml())
        except OSError as error:
            raise UsageError(f"--output {args.output}: {error.strerror}") from None
    if args.json:
        print_json(found.to_json())
    else:
        _print(new_console(), found, args.top, args.rejected)
    return 0 if found.fits else 1


def _say(text: str) -> None:
    """One line on a terminal's standard error, which the next one replaces. No thread: the search starts processes."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()


def _print(console: Console, found: Search, top: int, with_rejected: bool) -> None:
    console.print(
        f"{len(found.proposals)} plans fit on {found.devices} x {found.device.name}; {len(found.rejected)} were rejected "
        f"({found.seconds:.1f} s)"
    )
    for sentence in found.advice():
        console.print(sentence)
    if found.proposals:
        numbers = ("step ms", "compute", "memory", "exposed", "bubble", "host", "GiB")
        table = new_table("", "plan", *numbers, "figures", right=("", *numbers))
        for number, one in enumerate(found.proposals[:top], 1):
            terms = (one.figures.terms[name] for name in ("compute", "memory", "exposed", "bubble", "host"))
            seconds = (f"{1e3 * value:.4g}" for value in (one.figures.step_seconds, *terms))
            needed = f"{one.figures.needed_bytes / 2**30:.1f}"
            figures = "estimated" if one.figures.is_exact else "formula"
            table.add_row(str(number), str(one.choice), *seconds, needed, figures)
        console.print(table)
        console.print(f"entries of the first: {found.proposals[0].choice.source.name}")
    if with_rejected:
        _print_rejected(console, found)
        return
    by_rule: dict[str, Counter[str]] = {}
    for rejected in found.rejected:
        reason = "needs more memory than the device has" if rejected.rule == "memory" else rejected.reason
        by_rule.setdefault(rejected.rule, Counter())[reason] += 1
    if by_rule:
        console.print("\nrejected (--rejected prints each)")
    table = new_table("number", "rule", "reason", right=("number",))
    for rule, reasons in by_rule.items():
        for reason, count in reasons.most_common(_SHOWN):
            table.add_row(str(count), rule, reason)
        rest = sum(count for _, count in reasons.most_common()[_SHOWN:])
        if rest:
            table.add_row(str(rest), rule, "other reasons")
    console.print(table)


def _print_rejected(console: Console, found: Search) -> None:
    table = new_table("\nrejected", "ZeRO", "checkpointing", "stages", "needs", "rule", "reason", right=("needs",))
    for one in found.rejected:
        mesh = ",".join(f"{axis}={size}" for axis, size in one.what["mesh"].items())
        stages = one.what.get("pipeline") or {}
        table.add_row(
            mesh,
            str(one.what.get("zero", "")),
            str(one.what.get("checkpoint", "")),
            ", ".join(map(str, stages.values())),
            bytes_text(one.needed_bytes) if one.needed_bytes is not None else "",
            one.rule,
            one.reason,
        )
    console.print(table)
