"""``vescale advise --html``: one self-contained page with an SVG chart for each granularity."""

from __future__ import annotations

import math
from html import escape

from vescale.cli._advise_plan import Advice, Size, Study
from vescale.cli._advise_table import percent, shown_sizes, verdict

__all__ = ["page"]

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
