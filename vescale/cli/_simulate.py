"""``vescale simulate``: run a training script as some ranks of a job, without devices, and find where the job would stop."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from vescale.cli._console import bytes_text, new_console, new_table, print_json, working
from vescale.cli._inputs import add_json
from vescale.cli._main import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from vescale.simulation import Simulation

_FEW = 8  # ranks: all of them are simulated by default


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, metavar="N", help="number of ranks of the job (required)")
    parser.add_argument(
        "--rank",
        metavar="RANKS",
        help=f"ranks to run, such as 0,511 or 0-7 or all (default: all of up to {_FEW}, else the first two and the "
        "last one)",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=8, metavar="N", help="ranks on each node, for LOCAL_RANK (default: 8)"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="time limit of a rank (default: 300)"
    )
    parser.add_argument("--logs", metavar="FOLDER", help="write what each rank prints to FOLDER/rank_N.log")
    parser.add_argument("--collectives", action="store_true", help="list the collectives of each rank in order")
    add_json(parser)
    parser.add_argument("script", metavar="SCRIPT", help="a Python script, as passed to torchrun, after all options")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(args: argparse.Namespace) -> int:
    """0: nothing found; 1: findings."""
    from vescale.simulation import simulate

    if args.world is None:
        raise UsageError(
            f"--world is missing before {args.script}: pass --world N SCRIPT; what follows SCRIPT is passed to it"
        )
    if args.world < 1 or args.ranks_per_node < 1 or args.timeout <= 0:
        raise UsageError("--world, --ranks-per-node and --timeout must be positive numbers")
    ranks = _ranks(args.rank, args.world)
    try:
        with working(f"running {len(ranks)} of {args.world} ranks"):
            found = simulate(
                args.script,
                args.args,
                world_size=args.world,
                ranks=ranks,
                ranks_per_node=args.ranks_per_node,
                timeout=args.timeout,
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if args.logs:
        _write_logs(Path(args.logs), found)
    if args.json:
        print_json(found.to_json())
    else:
        _print(new_console(), found, listed=args.collectives)
    return 1 if found.findings else 0


def _ranks(text: str | None, world_size: int) -> list[int]:
    if text == "all" or (text is None and world_size <= _FEW):
        return list(range(world_size))
    if text is None:
        return [0, 1, world_size - 1]
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--rank {text}: write 0,511 or 0-7 or all")
        found |= set(range(int(first), int(last or first) + 1))
    return sorted(found)


def _write_logs(folder: Path, found: Simulation) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in found.logs.items():
            (folder / f"rank_{rank}.log").write_text(text)
    except OSError as error:
        raise UsageError(f"--logs {os.fspath(folder)}: {error.strerror}") from None


def _print(console: Console, found: Simulation, *, listed: bool) -> None:
    right = ("collectives", "received", "peak", "host seconds")
    table = new_table("simulated ranks", *right, "memory at the peak", right=right)
    for rank, record in sorted(found.ranks.items()):
        parts = sorted(record.categories.items(), key=lambda item: -item[1])[:4]
        table.add_row(
            f"{rank} of {found.world_size}",
            str(len(record.collectives)),
            bytes_text(sum(one.bytes for one in record.collectives)),
            bytes_text(record.peak_bytes),
            f"{record.host_seconds:.2f}",
            ", ".join(f"{name} {bytes_text(size)}" for name, size in parts),
        )
    console.print(table)
    if listed:
        for rank, record in sorted(found.ranks.items()):
            console.print(f"\ncollectives of rank {rank}")
            for number, one in enumerate(record.collectives):
                console.print(f"{number:5} {one.text()}, {bytes_text(one.bytes)}")
    for finding in found.findings:
        console.print(f"\n{finding.kind}: {finding.text}")
    if not found.findings:
        console.print("no findings: the collectives of these ranks agree, and none waits forever")
