"""``vescale estimate``: memory of every rank and seconds of a step for a plan and a model, before anything runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vescale.cli._console import bytes_text, new_console, new_table, print_json, working
from vescale.cli._inputs import (
    MODEL_HELP,
    PLAN_HELP,
    add_inputs,
    add_json,
    add_mesh,
    batch_of,
    load_model,
    load_plan,
    parse_dtype,
    parse_mesh,
)
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.estimation import Estimate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", nargs="?", help=PLAN_HELP)
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    add_mesh(parser)
    add_inputs(parser, None, None, "needed, unless --input is given")
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="name of the optimizer (default: adamw), or none"
    )
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="a device table such as h100-80g, or a YAML file"
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", help="dtype of the model's parameters, such as bfloat16 (default: as built)"
    )
    parser.add_argument(
        "--load",
        type=parse_load,
        default=1.0,
        help="load of experts: a multiple of the mean (default: 1), or the tokens of each expert, such as "
        "120,80,95,105",
    )
    parser.add_argument(
        "--rank", type=int, help="rank whose activations are measured (default: the one with most tokens)"
    )
    parser.add_argument("--steps", type=int, default=3, help="number of steps to run (default: 3)")
    parser.add_argument("--zero-table", action="store_true", help="also estimate ZeRO stages 0 to 3, and HSDP")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="also estimate a variant, such as batch=16; may be repeated",
    )
    parser.add_argument("--html", metavar="FILE", help="write the answer as an HTML page")
    parser.add_argument("--calibrate", metavar="FILE", help="measure this machine, and write a device table")
    parser.add_argument(
        "--world", type=int, default=2, metavar="N", help="ranks that --calibrate starts on this host (default: 2)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """0: it fits; 1: it does not, or the plan does not fit the model."""
    with working("loading torch"):
        from vescale.estimation import estimate, page, what_if, zero_table
        from vescale.plans import PlanError

    if args.calibrate:
        with working("measuring this machine"):
            _calibrate(args.calibrate, args.world)
        if args.plan is None:
            return 0
    if args.plan is None or args.model is None:
        raise UsageError("pass PLAN and --model, as in: llama --model hf:config.json --mesh dp=2 --batch 8 --seq 4096")
    model, mesh = load_model(args.model), parse_mesh(args.mesh)
    batch = batch_of(model, args)
    try:
        if args.dtype is not None:
            model = model.to(parse_dtype(args.dtype))
        plan = load_plan(args.plan, mesh)
        with working("running a rank without numbers"):
            found = estimate(
                model,
                plan,
                batch=batch,
                optimizer=args.optimizer,
                device=args.device,
                load=args.load,
                rank=args.rank,
                steps=args.steps,
            )
            found.zero_table = tuple(zero_table(found)) if args.zero_table else ()
            found.what_if = tuple(what_if(found, text) for text in args.what_if)
    except PlanError as error:
        if args.json:
            print_json({"error": str(error)})
        else:
            new_console().print(str(error))
        return 1
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    if args.html:
        try:
            with open(args.html, "w", encoding="utf-8") as file:
                file.write(page(found, f"{args.plan} for {args.model}"))
        except OSError as error:
            raise UsageError(f"--html {args.html}: {error.strerror}") from None
    if args.json:
        print_json(found.to_json())
    else:
        _print(new_console(), found)
    return 0 if found.fits else 1


def _calibrate(file: str, ranks: int) -> None:
    from vescale.estimation import calibrate

    if ranks < 2:
        raise UsageError(f"--world {ranks}: collectives need at least 2")
    if not os.path.isdir(os.path.dirname(os.path.abspath(file))):
        raise UsageError(f"--calibrate {file}: the folder does not exist")
    try:
        calibrate(file, ranks=ranks)
    except OSError as error:
        raise UsageError(f"--calibrate {file}: {error.strerror}") from None


def parse_load(text: str) -> float | list[float]:
    """A factor, or a histogram with commas."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if any(not number >= 0 for number in found) or not sum(found):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a factor (such as 1.2) nor the tokens of each expert (such as 120,80)"
        )
    return found[0] if len(found) == 1 else found


def _print(console: Console, found: Estimate) -> None:
    peak = found.peak
    memory = found.device.memory_bytes
    limit = f" of {_size(memory)}" if memory is not None else ""
    verdict = "fits" if found.fits else "does not fit"
    console.print(f"{verdict}: {_size(found.needed_bytes)}{limit} on rank {found.peak_rank} at {peak.peak_at}")
    table = new_table("memory at the peak", "", "most at any instant", right=("", "most at any instant"))
    for name, size in peak.categories.items():
        total = sum(size.values()) if isinstance(size, dict) else size
        table.add_row(name, bytes_text(total), bytes_text(peak.maximum[name]))
    table.add_row("all", bytes_text(peak.peak_bytes), "")
    if peak.first_step_bytes > peak.peak_bytes:
        table.add_row("peak of the first step", bytes_text(peak.first_step_bytes), "")
    for name, size in found.outside.items():
        table.add_row(f"outside of PyTorch: {name}", bytes_text(size), "")
    console.print(table)
    _print_ranks(console, found)
    _print_time(console, found)
    _print_rows(console, "ZeRO", "stage", found.zero_table)
    _print_rows(console, "What if", "what_if", found.what_if)
    for note in found.notes:
        console.print(f"note: {note}")


def _print_ranks(console: Console, found: Estimate) -> None:
    if len(found.ranks) == 1:
        console.print(f"all {len(found.ranks[0].ranks)} ranks need the same")
        return
    table = new_table(
        "\nranks", "number", "peak", "parameters", "optimizer", right=("number", "peak", "parameters", "optimizer")
    )
    for rank in sorted(found.ranks, key=lambda one: -one.peak_bytes)[:10]:
        names = ", ".join(map(str, rank.ranks[:6])) + (", ..." if len(rank.ranks) > 6 else "")
        sizes = (rank.peak_bytes, rank.categories["parameters"], rank.categories["optimizer"])
        table.add_row(names, str(len(rank.ranks)), *map(bytes_text, sizes))
    console.print(table)
    if len(found.ranks) > 10:
        console.print(f"and {len(found.ranks) - 10} other groups of ranks, which need less")


def _print_time(console: Console, found: Estimate) -> None:
    terms = found.time.terms()
    table = new_table("\ntime of a step", "ms", "relative error", right=("ms", "relative error"))

    def add(name: str, term: Mapping[str, Any]) -> None:
        table.add_row(name, f"{1e3 * term['seconds']:.4g}", f"{term['relative_error']:.0%}")

    for name in ("compute", "memory", "exposed", "bubble", "host"):
        if terms[name]["seconds"]:
            add(name, terms[name])
    table.add_row("step", f"{1e3 * found.step_seconds:.4g}", "")
    if terms["collectives"]:
        table.add_row("collectives, hidden by compute or exposed", "", "")
    for name, term in terms["collectives"].items():
        add(f"  {name}, {bytes_text(term['bytes'])}", term)
    console.print(table)
    time = found.time
    console.print(
        f"MFU {time.mfu:.1%} (share of the device's peak), {time.tokens_per_second:,.0f} tokens/s for the whole batch"
    )


def _print_rows(console: Console, title: str, key: str, rows: tuple[dict[str, Any], ...]) -> None:
    if not rows:
        return
    names = ("peak_bytes", "parameters", "gradients", "optimizer", "unsharded", "activations")
    numbers = (*(name.removesuffix("_bytes") for name in names), "ms")
    table = new_table(f"\n{title}", *numbers, "", right=numbers)
    for row in rows:
        if "error" in row:
            table.add_row(row[key], *[""] * len(names), "", row["error"])
        else:
            fits = "fits" if row["fits"] else "does not fit"
            table.add_row(row[key], *(bytes_text(row[n]) for n in names), f"{1e3 * row['step_seconds']:.4g}", fits)
    console.print(table)


def _size(num_bytes: int) -> str:
    return f"{bytes_text(num_bytes)} ({num_bytes / 1e9:.2f} GB)"
