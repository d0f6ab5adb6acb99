"""``vescale advise``: finds the group sizes with the least padding before a job starts.

The offline simulation that the veScale-FSDP paper recommends: it plans every unit of a model for every granularity and
group size, and reports how much padding is needed, how much of it is inherent, and how much a second buffer would save.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import regex

from vescale.cli._main import UsageError
from vescale.cli._optimizer_rule import add_optimizer, parse_optimizer

__all__ = ["add_arguments", "run"]

_MAX_SIZES = 4096
_EPILOG = """\
MODEL is a config.json of transformers or diffusers, the folder that has one,
hf:OWNER/NAME on the Hugging Face Hub, a JSON file with shapes ([[4096, 4096],
...] or {"name": shape}), or the name of a shipped list (vescale advise list
shows them). Repeated blocks are planned once.

examples:
  vescale advise gpt-oss-120b --granularity 1,16,120 --ranks 8..64 --html x.html
  vescale advise hf:config.json --ranks 64,128,256 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="config.json, JSON shapes, a shipped list, or 'list'")
    parser.add_argument(
        "--granularity", default="1,16,128", metavar="ROWS", help="rows per block, e.g. 1,16,128 (default %(default)s)"
    )
    parser.add_argument(
        "--ranks",
        default="8..2048",
        metavar="SIZES",
        help="group sizes: 64,128 or 8..2048 (every multiple of 8), 8..2048:16 (in steps of 16), "
        "8..2048:x2 (doubling); default %(default)s",
    )
    parser.add_argument(
        "--match",
        metavar="REGEX",
        help="which weights have row blocks, by whole name (default: FFN and expert matrices)",
    )
    parser.add_argument(
        "--across-experts",
        action="store_true",
        help="let blocks run from one fused expert into the next, as the paper does",
    )
    add_optimizer(parser)
    parser.add_argument(
        "--alignment",
        type=int,
        default=8,
        metavar="N",
        help="shards are multiples of N elements (default 8: 16 bytes of bf16)",
    )
    parser.add_argument(
        "--max-padding", type=float, default=1.0, metavar="PERCENT", help="what counts as little (default %(default)s)"
    )
    parser.add_argument(
        "--effort",
        default="1000000",
        help="entries of the planner's largest table, or fast, or thorough (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts, complete in one file")


def run(args: argparse.Namespace) -> int:
    """Exit code 0; 1 when a granularity is refused or no size stays within --max-padding; 2 for bad input."""
    from vescale.buffer import FFN_WEIGHTS, shape_list_names
    from vescale.cli._advise_html import page
    from vescale.cli._advise_model import read_model
    from vescale.cli._advise_plan import Study, study
    from vescale.cli._advise_table import print_study, print_units, progress

    if args.model == "list":
        names = shape_list_names()
        print(json.dumps(names) if args.json else "\n".join(names))
        return 0
    rows = _numbers("--granularity", args.granularity)
    sizes = _numbers("--ranks", args.ranks)
    if args.alignment < 1:
        raise UsageError(f"--alignment is {args.alignment}; expected at least 1. 8 is 16 bytes of bfloat16.")
    if not 0 <= args.max_padding < float("inf"):
        raise UsageError(f"--max-padding is {args.max_padding}; expected a percentage of at least 0, such as 1.")
    effort = int(args.effort) if args.effort.isdecimal() else args.effort
    if effort not in ("fast", "thorough") and not (isinstance(effort, int) and effort > 0):
        raise UsageError(f"--effort is {args.effort!r}; expected fast, thorough or a positive number of table entries.")
    if args.match is not None:
        try:
            regex.compile(args.match)
        except regex.error as error:
            raise UsageError(f"--match {args.match!r} is not a regular expression: {error}.") from error
    if args.html and not Path(args.html).absolute().parent.is_dir():
        raise UsageError(f"--html {args.html}: the folder does not exist. Make it first, or choose another.")
    rule = parse_optimizer(args.optimizer)
    model = read_model(args.model)

    result = None
    steps = study(
        model,
        rows,
        sizes,
        pattern=args.match or FFN_WEIGHTS,
        across_experts=args.across_experts,
        alignment=args.alignment,
        effort=effort,
        rule=rule,
    )
    with progress(hidden=args.json) as report:
        for step in steps:
            if isinstance(step, Study):
                result = step
            else:
                report(*step)
    assert result is not None
    if args.match and not result.matched:
        examples = ", ".join([unit.full_name(name) for unit in model.units for name, _ in unit.parameters][:5])
        raise UsageError(f"--match {args.match!r} matches no parameter; names are like {examples}.")
    limit = args.max_padding / 100
    if args.html:
        try:
            Path(args.html).write_text(page(result, limit), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write --html {args.html}: {error.strerror}.") from error
    if args.json:
        json.dump(_as_json(result, limit), sys.stdout)
        print()
    else:
        print_units(result)
        print_study(result, limit)
        if args.html:
            print(f"\nwritten: {args.html}")
    return 1 if any(advice.largest_within(limit) is None for advice in result.advice) else 0


def _numbers(option: str, text: str) -> list[int]:
    """``64,128`` and ``8..2048`` and mixtures, sorted."""
    found: set[int] = set()
    for part in text.split(","):
        match = regex.fullmatch(r"\s*(\d+)(?:\.\.(\d+)(?::(x?)(\d+))?)?\s*", part)
        if match is None:
            raise UsageError(
                f"{option} {text!r}: {part.strip()!r} is no number or range. Write 64,128 or 8..2048 or 8..2048:x2."
            )
        first, last = int(match[1]), int(match[2] or match[1])
        step = int(match[4]) if match[4] else first
        if first < 1 or last < first or step < 1 or (match[3] and step < 2):
            raise UsageError(f"{option} {text!r}: {part.strip()!r} is empty or starts below 1. Write it as 8..2048.")
        if match[3]:
            while first <= last:
                found.add(first)
                first *= step
        elif (last - first) // step >= _MAX_SIZES:
            found.update(range(_MAX_SIZES + 1))
        else:
            found.update(range(first, last + 1, step))
        if len(found) > _MAX_SIZES:
            raise UsageError(
                f"{option} {text!r} means more than {_MAX_SIZES} sizes. Give a step: 8..{last}:64 or 8..{last}:x2."
            )
    return sorted(found)


def _as_json(result: object, limit: float) -> dict[str, object]:
    from vescale.cli._advise_plan import Study

    assert isinstance(result, Study)
    return {
        "model": result.model.name,
        "source": result.model.source,
        "alignment": result.alignment,
        "effort": result.effort,
        "pattern": result.pattern,
        "optimizer": None if result.rule is None else asdict(result.rule),
        "num_matched": len(result.matched),
        "units": [
            {"path": unit.path, "count": unit.count, "num_parameters": len(unit.parameters)}
            for unit in result.model.units
        ],
        "granularities": [
            {
                "rows": advice.rows,
                "refused": advice.refused,
                "largest_within": {
                    "max_padding": limit,
                    "num_shards": best.num_shards if (best := advice.largest_within(limit)) else None,
                },
                "best": [size.num_shards for size in advice.best()],
                "sizes": [{**asdict(size), "proven": size.proven} for size in advice.sizes],
            }
            for advice in result.advice
        ],
    }
