"""A page about an estimate: one HTML file without other files."""

from __future__ import annotations

from html import escape
from typing import Any

from vescale.comm import bytes_text
from vescale.estimation._estimate import Estimate
from vescale.estimation._memory_timeline import CATEGORIES
from vescale.ir import merge_repeats

_COLORS = ("#1f6feb", "#2da44e", "#8250df", "#bf8700", "#cf222e", "#0598bc", "#8c959f", "#bc4c00", "#57606a")
_WIDTH, _HEIGHT = 1000, 260

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --muted: #616e7c; --line: #d9dee3; --paper: #fff; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --muted: #9aa5b1; --line: #3a434d; --paper: #14181d;
  --card: #1c2229; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } .muted { color: var(--muted); }
svg { display: block; width: 100%; height: auto; background: var(--card); border-radius: 8px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .scroll { overflow-x: auto; }
th, td { padding: .15rem .8rem .15rem 0; text-align: right; white-space: nowrap; } th:first-child, td:first-child
  { text-align: left; } tbody tr { border-top: 1px solid var(--line); }
.bars { width: min(100%, 40rem); } .bars td:first-child { white-space: normal; width: 50%; }
.bars td:last-child { width: 30%; }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: .5rem 0; }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem; }
"""


def page(estimate: Estimate, title: str) -> str:
    """The page's HTML.

    Args:
        estimate: what ``vescale.estimate`` returned.
        title: of the page.
    """
    peak = estimate.peak
    sums = {name: _sum(size) for name, size in peak.categories.items()}
    terms = estimate.time.terms()
    verdict = "It fits" if estimate.fits else "It does not fit"
    key = "".join(f"<span><i style='background:{c}'></i>{n}</span>" for n, c in zip(CATEGORIES, _COLORS))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{verdict}: {bytes_text(estimate.needed_bytes)} on rank {estimate.peak_rank} of {escape(str(estimate.axes))} "
        f"({escape(estimate.device.name)}); the peak is at <b>{escape(peak.peak_at)}</b>. A step takes "
        f"{1e3 * estimate.step_seconds:.4g} ms, with an MFU of {estimate.time.mfu:.1%} (of the device's peak).</p>",
        f"<h2>Memory during a step</h2><div class=key>{key}</div>{_areas(peak.timeline)}",
        "<h2>At the peak</h2>" + _table(("category", "size"), [(n, bytes_text(v)) for n, v in sums.items()]),
        "<h2>Activations by module</h2><p class=muted>Activations of each module itself, without those of the "
        "modules inside it, which have separate rows.</p>" + _bars(_merged(peak.categories["activations"])),
        "<h2>Ranks</h2>" + _bars({_ranks(r.ranks): r.peak_bytes for r in estimate.ranks}),
        "<h2>Time of a step</h2>"
        + _table(("term", "ms"), [(n, _ms(terms[n])) for n in ("compute", "memory", "exposed", "bubble", "host")]),
        "<h2>Collectives</h2>"
        + _table(
            ("axes and op", "size", "ms"),
            [(n, bytes_text(t["bytes"]), _ms(t)) for n, t in terms["collectives"].items()],
        ),
    ]
    for name, heading, table in (("what_if", "What if", estimate.what_if), ("stage", "ZeRO", estimate.zero_table)):
        if table:
            parts.append(
                f"<h2>{heading}</h2>" + _table(("choice", "peak", "ms", ""), [_row(name, row) for row in table])
            )
    parts += [f"<p class=muted>{escape(note)}</p>" for note in estimate.notes]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return row[name], "", "", row["error"]
    return (
        row[name],
        bytes_text(row["peak_bytes"]),
        f"{1e3 * row['step_seconds']:.4g}",
        "fits" if row["fits"] else "does not fit",
    )


def _areas(moments: tuple[dict[str, Any], ...]) -> str:
    """Stacked bars, one for each moment."""
    most = max((m["bytes"] for m in moments), default=1) or 1
    width = _WIDTH / max(len(moments), 1)
    found = []
    for number, moment in enumerate(moments):
        top = float(_HEIGHT)
        for name, color in zip(CATEGORIES, _COLORS):
            height = moment[name] / most * (_HEIGHT - 20)
            if height > 0:
                top -= height
                found.append(
                    f"<rect x='{number * width:.1f}' y='{top:.1f}' width='{width:.2f}' height='{height:.1f}' fill='{color}'>"
                    f"<title>{escape(moment['at'])}: {name} {bytes_text(moment[name])}</title></rect>"
                )
    return f"<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role=img aria-label='memory by moment'>{''.join(found)}</svg>"


def _bars(sizes: dict[str, int], most: int = 30) -> str:
    chosen = sorted(sizes.items(), key=lambda item: -item[1])
    largest = max((size for _, size in chosen), default=1) or 1
    rows = "".join(
        f"<tr><td>{escape(name or '(the model)')}</td><td>{bytes_text(size)}</td><td>"
        f"<div style='background:{_COLORS[0]};height:.8rem;width:{100 * size / largest:.1f}%'></div></td></tr>"
        for name, size in chosen[:most]
    )
    rest = sum(size for _, size in chosen[most:])
    if rest:
        rows += f"<tr><td>{len(chosen) - most} more</td><td>{bytes_text(rest)}</td><td></td></tr>"
    return f"<table class=bars><tbody>{rows}</tbody></table>"


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f", ... ({len(ranks)} ranks)" if len(ranks) > 4 else "")


def _ms(term: dict[str, Any]) -> str:
    return f"{1e3 * term['seconds']:.4g}"


def _merged(sizes: dict[str, int]) -> dict[str, int]:
    """Equal modules that follow each other as one row, with what they have together."""
    return {
        f"{path} ({count} modules)" if count > 1 else path: size * count
        for path, size, count in merge_repeats(sizes.items())
    }


def _sum(size: Any) -> int:
    return sum(size.values()) if isinstance(size, dict) else int(size)
