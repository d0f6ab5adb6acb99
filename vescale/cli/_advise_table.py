"""``vescale advise`` in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vescale.cli._advise_plan import Advice, Size, Study

__all__ = ["percent", "print_study", "print_units", "progress", "shown_sizes", "verdict"]


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
