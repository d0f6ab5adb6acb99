"""``vescale advise``: finds the group sizes with the least padding before a job starts.

The offline simulation that the veScale-FSDP paper recommends: it plans every unit of a model for every granularity and
group size, and reports how much padding is needed, how much of it is inherent, and how much a second buffer would save.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import regex
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vescale.buffer import ModelShapes, group_units, shape_list, shape_list_names
from vescale.cli._advise_plan import Advice, Size, Study
from vescale.cli._hf_config import CONFIG_HELP, config_file
from vescale.cli._inputs import load_model
from vescale.cli._main import UsageError
from vescale.cli._optimizer_rule import add_optimizer, parse_optimizer

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
    from vescale.cli._advise_plan import Study, study
    from vescale.cli.advise import page, print_study, print_units, progress, read_model

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


# ``vescale advise`` in the terminal.


@contextmanager
def progress(hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error, removed at the end; none unless that is a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("planning"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} sizes"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=hidden or not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def percent(ratio: float) -> str:
    """0 %, < 0.01 %, 0.05 %, 17.49 %, 778 %."""
    value = 100 * ratio
    if value == 0:
        return "0 %"
    if value < 0.01:
        return "< 0.01 %"
    return f"{value:.2f} %" if value < 100 else f"{value:,.0f} %"


def print_units(study: Study) -> None:
    table = Table(title=f"{study.model.name} ({study.model.source})", title_justify="left", box=None, pad_edge=False)
    table.add_column("unit")
    for name in ("of them", "parameters", "elements"):
        table.add_column(name, justify="right")
    for unit in study.model.units:
        elements = sum(math.prod(shape) for _, shape in unit.parameters)
        table.add_row(unit.path, f"{unit.count:,}", f"{len(unit.parameters):,}", f"{elements:,}")
    console = Console()
    console.print(table)
    if not study.matched:
        console.print("[yellow]No parameter has row blocks: all may be cut anywhere. --match chooses others.[/]")


def print_study(study: Study, limit: float) -> None:
    console = Console()
    for advice in study.advice:
        console.print()
        if advice.refused is not None:
            text = Text(f"{_rows(advice)}: refused. ", style="bold red")
            text.append(f"{advice.refused} --across-experts ignores where experts end.", style="not bold default")
            console.print(text)
            continue
        table = Table(title=f"{_rows(advice)}, padding", title_justify="left", title_style="bold", pad_edge=False)
        for name in ("ranks", "one buffer", "inherent", "two buffers"):
            table.add_column(name, justify="right")
        table.add_column("unit that wastes most")
        best = {size.num_shards for size in advice.best()}
        for size in shown_sizes(advice):
            table.add_row(
                f"[bold]{size.num_shards:,} ★[/]" if size.num_shards in best else f"{size.num_shards:,}  ",
                f"[{'green' if size.padding <= limit else 'red'}]{percent(size.padding)}[/]",
                percent(size.inherent),
                "" if size.two_buffers is None else percent(size.two_buffers),
                f"{size.worst_unit} ({percent(size.worst_padding)})",
            )
        console.print(table)
        console.print(verdict(advice, limit))
    note = "Inherent: proven that one buffer for each unit cannot need less."
    if any(advice.best() for advice in study.advice):
        note = f"★ least padding from one power of two to the next. {note}"
    console.print(f"\n{note}")


def _rows(advice: Advice) -> str:
    return f"Blocks of {advice.rows} row{'s' if advice.rows > 1 else ''}"


def shown_sizes(advice: Advice) -> list[Size]:
    """The best sizes and every doubling of the smallest; all when they are few."""
    if len(advice.sizes) <= 16:
        return list(advice.sizes)
    smallest = advice.sizes[0].num_shards
    best = {size.num_shards for size in advice.best()}
    return [
        size
        for size in advice.sizes
        if size.num_shards in best
        or (size.num_shards % smallest == 0 and (size.num_shards // smallest).bit_count() == 1)
    ]


def verdict(advice: Advice, limit: float) -> str:
    """The recommendation, in one or two sentences."""
    best = advice.largest_within(limit)
    worst = max(advice.sizes, key=lambda size: (size.padding, size.num_shards))
    if best is None:
        least = min(advice.sizes, key=lambda size: (size.padding, -size.num_shards))
        text = f"No size within {percent(limit)}; {least.num_shards:,} ranks come closest ({percent(least.padding)})."
    else:
        text = f"Largest group within {percent(limit)}: {best.num_shards:,} ranks ({percent(best.padding)})."
    if worst.padding > limit:
        kind = "inherent to one buffer" if worst.proven else f"partly inherent ({percent(worst.inherent)} proven)"
        text += f" Worst: {worst.num_shards:,} ranks with {percent(worst.padding)}, {kind}"
        if worst.two_buffers is not None and worst.two_buffers < worst.padding - 1e-3:
            text += f"; two buffers need {percent(worst.two_buffers)}"
        text += "."
    return text


# ``vescale advise --html``: one self-contained page with an SVG chart for each granularity.

_WIDTH, _HEIGHT = 920, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 14, 40
_CEILING = 0.4  # padding beyond it is drawn at the top edge

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #616e7c; --line: #d9dee3; --paper: #fff; --card: #f6f8fa;
  --one: #1f6feb; --two: #d9730d; --bound: #8896a544; --good: #1a7f37; --bad: #c62828; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #3a434d; --paper: #14181d;
  --card: #1c2229; --one: #6cb0ff; --two: #ffa657; --bound: #9aa5b140; --good: #57d07b; --bad: #ff7b72; } }
body { overflow-wrap: anywhere; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 960px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0 .8rem; } .muted { color: var(--muted); } .bad { color: var(--bad); } .good { color: var(--good); }
svg { display: block; width: 100%; height: auto; background: var(--card); border-radius: 8px; }
svg text { fill: var(--muted); font: 12px system-ui, sans-serif; }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .9rem .15rem 0; text-align: right; } th { color: var(--muted); font-weight: 500; }
th:last-child, td:last-child, th.name, td.name { text-align: left; } tbody tr { border-top: 1px solid var(--line); }
summary { cursor: pointer; color: var(--muted); }
.key { display: flex; gap: 1.4rem; flex-wrap: wrap; color: var(--muted); margin: .5rem 0; }
.key i { display: inline-block; width: 1.5rem; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: .4rem; }
.scroll { overflow-x: auto; }
@media (max-width: 600px) { body { margin: 1rem auto; padding: 0 .6rem; } th, td { padding-right: .6rem; }
  th, td { overflow-wrap: normal; } td:not(:last-child) { white-space: nowrap; }
  svg { min-width: 620px; } td:last-child { min-width: 9rem; } }
.key i.area { height: .8rem; border: 0; background: var(--bound); }
"""


def page(study: Study, limit: float) -> str:
    """The page's HTML. ``limit``: the padding ratio that counts as little."""
    units = "".join(
        f"<tr><td class=name>{escape(unit.path)}</td><td>{unit.count:,}</td><td>{len(unit.parameters):,}</td>"
        f"<td>{sum(math.prod(shape) for _, shape in unit.parameters):,}</td></tr>"
        for unit in study.model.units
    )
    html = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Group sizes for {escape(study.model.name)}</title><style>{_STYLE}</style></head><body>
<h1>Group sizes for {escape(study.model.name)}</h1>
<p class="muted">Padding of the planned communication buffers by the size of all parameters.
{escape(study.model.source)}; shards are multiples of {study.alignment} elements; row blocks on {len(study.matched):,}
parameters of the units below, the others may be cut anywhere.</p>
<div class='scroll'><table>
<thead><tr><th class=name>unit</th><th>of them</th><th>parameters</th><th>elements</th></tr></thead>
<tbody>{units}</tbody></table></div>
<div class="key"><span><i style="border-color: var(--one)"></i>one buffer for each unit</span>
<span><i style="border-color: var(--two); border-top-style: dashed"></i>two buffers</span>
<span><i class="area"></i>inherent: proven for one buffer</span>
<span><i style="border-color: var(--good); border-top: 1px solid var(--good)"></i>{percent(limit)}</span></div>
{"".join(_section(advice, limit) for advice in study.advice)}
</body></html>
"""
    return html.replace(" %", "\N{NO-BREAK SPACE}%")


def _section(advice: Advice, limit: float) -> str:
    title = f"<h2>Blocks of {advice.rows} row{'s' if advice.rows > 1 else ''}</h2>"
    if advice.refused is not None:
        return f"{title}<p class=bad>Refused. {escape(advice.refused)}</p>"
    best = {size.num_shards for size in advice.best()}
    rest = ""
    if len(shown_sizes(advice)) < len(advice.sizes):
        everything = _table(list(advice.sizes), best, limit)
        rest = f"<details><summary>all {len(advice.sizes)} sizes</summary>{everything}</details>"
    return (
        f"{title}<p>{escape(verdict(advice, limit))}</p><div class='scroll'>{_chart(advice, limit)}</div>"
        f"{_table(shown_sizes(advice), best, limit)}{rest}"
    )


def _table(sizes: list[Size], best: set[int], limit: float) -> str:
    rows = "".join(
        f"<tr><td>{size.num_shards:,}{' ★' if size.num_shards in best else ''}</td>"
        f"<td class={'good' if size.padding <= limit else 'bad'}>{percent(size.padding)}</td>"
        f"<td>{percent(size.inherent)}</td>"
        f"<td>{'' if size.two_buffers is None else percent(size.two_buffers)}</td>"
        f"<td>{escape(size.worst_unit)} ({percent(size.worst_padding)})</td></tr>"
        for size in sizes
    )
    return (
        "<div class='scroll'><table><thead><tr><th>ranks</th><th>one buffer</th><th>inherent</th><th>two buffers</th>"
        f"<th>unit that wastes most</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _chart(advice: Advice, limit: float) -> str:
    """Padding over group size: on a log axis for a few sizes, on a linear one where many make a sawtooth."""
    sizes = advice.sizes
    first, last = sizes[0].num_shards, sizes[-1].num_shards
    scale = float if len(sizes) > 32 else math.log2
    low, high = scale(first), scale(last)
    top = _round_ceiling(min(_CEILING, max([limit * 1.5, 1e-4, *(size.padding for size in sizes)])))

    def x(num_shards: float) -> float:
        share = (scale(num_shards) - low) / (high - low) if high > low else 0.5
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(ratio: float) -> float:
        return round(_HEIGHT - _BOTTOM - min(1.0, ratio / top) * (_HEIGHT - _TOP - _BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="padding by number of ranks">']
    for step in range(5):
        ratio = top * step / 4
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(ratio)}" y2="{y(ratio)}" stroke="var(--line)"/>'
            f'<text x="{_LEFT - 8}" y="{y(ratio) + 4}" text-anchor="end">{100 * ratio:g} %</text>'
        )
    if scale is float:
        step = 1 << max(0, (last // 6).bit_length() - 1)
        ticks = [first, *range(step, last + 1, step)] if first < step / 2 else list(range(step, last + 1, step))
    else:
        ticks = [size.num_shards for size in sizes] if len(sizes) <= 12 else [1 << power for power in range(32)]
    for tick in (tick for tick in ticks if first <= tick <= last):
        parts.append(
            f'<line x1="{x(tick)}" x2="{x(tick)}" y1="{_HEIGHT - _BOTTOM}" y2="{_HEIGHT - _BOTTOM + 5}" '
            f'stroke="var(--muted)"/>'
            f'<text x="{x(tick)}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tick:,}</text>'
        )
    parts.append(f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">ranks in a group</text>')
    floor = " ".join(f"{x(size.num_shards)},{y(size.inherent)}" for size in sizes)
    parts.append(
        f'<polygon points="{x(sizes[0].num_shards)},{y(0)} {floor} {x(sizes[-1].num_shards)},{y(0)}" '
        'fill="var(--bound)"/>'
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(limit)}" y2="{y(limit)}" stroke="var(--good)"/>'
    )
    two = [(size.num_shards, size.padding if size.two_buffers is None else size.two_buffers) for size in sizes]
    one = [(size.num_shards, size.padding) for size in sizes]
    for series, color, dash in ((one, "--one", ""), (two, "--two", ' stroke-dasharray="5 3"')):
        points = " ".join(f"{x(ranks)},{y(ratio)}" for ranks, ratio in series)
        parts.append(f'<polyline points="{points}" fill="none" stroke="var({color})" stroke-width="1.8"{dash}/>')
    for size in sizes:
        note = f"{size.num_shards:,} ranks: {percent(size.padding)}, inherent {percent(size.inherent)}"
        if size.two_buffers is not None:
            note += f", two buffers {percent(size.two_buffers)}"
        radius = 3 if len(sizes) <= 64 else 1.6
        parts.append(
            f'<circle cx="{x(size.num_shards)}" cy="{y(size.padding)}" r="{radius}" fill="var(--one)">'
            f"<title>{note}</title></circle>"
        )
        if size.padding > top:
            parts.append(f'<text x="{x(size.num_shards)}" y="{_TOP - 3}" text-anchor="middle">▲</text>')
    if any(size.padding > top for size in sizes):
        parts.append(f'<text x="{_LEFT + 6}" y="{_TOP + 12}">▲ beyond {100 * top:g} %</text>')
    return "".join(parts) + "</svg>"


def _round_ceiling(ratio: float) -> float:
    """The next round number, a quarter of which is round, too."""
    power = 10.0 ** math.floor(math.log10(ratio))
    return next(step * power for step in (1, 2, 3, 4, 6, 8, 10) if step * power >= ratio * (1 - 1e-9))


# The model of ``vescale advise``: a Hugging Face configuration, a list of shapes, or a shipped list.


def read_model(text: str) -> ModelShapes:
    """The model named on the command line.

    Raises:
        UsageError: no such file or list, a broken file, or a configuration that transformers does not know.
    """
    if text in shape_list_names():
        return shape_list(text)
    names = shape_list_names()
    if not text.startswith("hf:") and not Path(text).exists():
        close = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(
            f"{text!r} is neither a file nor a shipped shape list.{hint} Shipped are {', '.join(names)}; a file is "
            f"{CONFIG_HELP}, or a JSON list of shapes."
        )
    config = config_file(text)
    if config is not None:
        shapes = {name: tuple(parameter.shape) for name, parameter in load_model(text).named_parameters()}
        return ModelShapes(config.name, f"Hugging Face configuration {config}", group_units(shapes))
    path = Path(text)
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}. Pass a JSON file.") from error
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}. Correct the file at this place."
        ) from error
    if isinstance(data, dict) and "format" in data:
        try:
            model = ModelShapes.from_json(json.dumps(data))
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        if not any(unit.parameters for unit in model.units):
            raise UsageError(f"{path}: no shapes. List at least one tensor.")
        return model
    return ModelShapes(path.name, f"shapes in {path}", group_units(_from_shapes(path, data)))


def _from_shapes(path: Path, data: Any) -> dict[str, tuple[int, ...]]:
    """``[[4096, 4096], [4096]]``, ``[["name", [4096]], ...]`` or ``{"name": [4096], ...}``."""
    if isinstance(data, dict):
        pairs = list(data.items())
    elif isinstance(data, list):
        pairs = [
            (entry[0], entry[1])
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str)
            else (f"tensor{i}", entry)
            for i, entry in enumerate(data)
        ]
    else:
        raise UsageError(f"{path} holds {json.dumps(data)[:40]}; expected shapes, in a list or by name.")
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in pairs:
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UsageError(
                f"{path}: the shape of {name!r} is {json.dumps(shape)}; expected a list of sizes like [4096, 1024]."
            )
        if name in shapes:
            raise UsageError(f"{path}: {name!r} occurs twice. Give each tensor its own name.")
        shapes[name] = tuple(shape)
    if not shapes:
        raise UsageError(f"{path}: no shapes. List at least one tensor.")
    return shapes
