"""A page about an estimate: one HTML file without other files."""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape
from typing import Any

import torch

from vescale.comm import bytes_text
from vescale.estimation._estimate import Estimate
from vescale.estimation._memory_timeline import CATEGORIES
from vescale.estimation._variants import changed, row_of

# What the page's sliders show: estimates of other batches, sequences, stages and checkpointing, and how they add up.

_STAGES = ("0", "1", "2", "3")
_POLICIES = ("none", "selective", "full", "offload")


def sliders_of(estimate: Estimate, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Rows of estimates: of the plan, of twice the batch, of half and twice the sequence, of each stage of ZeRO and of
    each policy of checkpointing. Choices that the plan or the model does not take are left out.

    Args:
        estimate: of the plan; each row is one more estimate of the same arguments.
        progress: called with what is estimated next.
    """
    sizes = _sizes(estimate)
    found: dict[str, Any] = {"base": row_of(estimate), "sizes": sizes, "batch": {}, "sequence": {}}

    def add(name: str, value: str, key: str) -> None:
        if progress is not None:
            progress(f"{name}={value}")
        row = changed(estimate, {name: value}, f"{name}={value}")
        if "error" not in row:
            found.setdefault(name, {})[key] = row

    if "batch" in sizes:
        add("batch", str(2 * sizes["batch"]), "2")
    if "sequence" in sizes:
        add("sequence", str(2 * sizes["sequence"]), "2")
        if sizes["sequence"] % 2 == 0:
            add("sequence", str(sizes["sequence"] // 2), "0.5")
    for stage in _STAGES:
        add("stage", stage, stage)
    for policy in _POLICIES:
        add("checkpoint", policy, policy)
    return found


def _sizes(estimate: Estimate) -> dict[str, int]:
    """Rows, and numbers of a row, of the first input that has some."""
    for value in estimate.given["batch"].values():
        shape = value.shape if isinstance(value, torch.Tensor) else value
        if isinstance(shape, tuple | list | torch.Size) and shape and all(type(n) is int for n in shape):
            return dict(zip(("batch", "sequence"), shape[:2]))
    return {}


def sliders_text(rows: dict[str, Any]) -> str:
    """The page's part; ``rows`` as :func:`sliders_of` returns them."""

    def slider(name: str, least: int, most: int) -> str:
        if not rows.get(name):
            return ""
        return (
            f"<label>{name} <input id={name} type=range min={least} max={most} step=1 value=0> "
            f"<output id={name}-at></output></label>"
        )

    def choice(name: str, label: str) -> str:
        own = rows.get(name, {})
        if not own:
            return ""
        options = "".join(f"<option>{value}</option>" for value in own)
        return f"<label>{label} <select id={name}><option value=''>the plan's</option>{options}</select></label>"

    return (
        "<h2>What if</h2>"
        + slider("batch", -3, 5)
        + slider("sequence", -3, 5)
        + choice("stage", "stage of ZeRO")
        + choice("checkpoint", "checkpointing")
        + "<p id=scaled></p><div id=parts class=parts></div><p class=muted>One change alone to a stage, a policy, half or "
        "twice a size is an estimate; others are computed from these.<span id=runs hidden> <code id=command></code> runs "
        "it.</span></p>"
    )


SLIDERS_SCRIPT = """
const row = (name, key) => (data.rows[name] || {})[key], base = data.rows.base, sizes = data.rows.sizes;
const part = (of, c) => of ? of[c] - base[c] : 0, at = id => document.getElementById(id);
const total = of => data.names.reduce((sum, c) => sum + of[c], 0);
// What grows with the batch is what twice the batch has more; with the sequence it grows as a square through three points.
const more = c => part(row("batch", "2") || row("sequence", "2"), c);
const grown = (f, of) => { const d = of(row("sequence", "2") || base) - of(base), h = row("sequence", "0.5");
  const all = of(row("batch", "2") || row("sequence", "2") || base) - of(base);
  if (!all || f === 1) return 1;
  const low = h ? of(h) - of(base) : -d / 2, square = (d + 2 * low) / 1.5, line = d - square;
  return Math.max(0, 1 + (line * (f - 1) + square * (f - 1) * (f - 1)) / all); };
const seconds = of => of.device_seconds;
const whatIf = (batch, length, stage, policy) => { const found = {};
  const s = row("stage", stage), p = row("checkpoint", policy);
  const set = (c, f) => found[c] = Math.max(0, base[c] + part(s, c) + part(p, c) * f + more(c) * (f - 1));
  for (const c of data.names) set(c, batch * grown(length, total));
  set("device_seconds", batch * grown(length, seconds));
  const host = base.host_seconds + part(s, "host_seconds") + part(p, "host_seconds");
  found.step_seconds = data.gpu ? Math.max(found.device_seconds, host) : found.device_seconds + host;
  return found; };
const read = id => at(id) ? 2 ** Number(at(id).value) : 1, chosen = id => at(id) ? at(id).value : "";
const show = () => { const b = read("batch"), l = read("sequence"), s = chosen("stage"), p = chosen("checkpoint");
  const found = whatIf(b, l, s, p), needed = total(found) + data.outside, changes = [];
  for (const [id, f] of [["batch", b], ["sequence", l]]) if (at(id)) { const n = Math.max(1, Math.round(sizes[id] * f));
    at(id + "-at").textContent = n; if (f !== 1) changes.push(id + "=" + n); }
  for (const [id, v] of [["stage", s], ["checkpoint", p]]) if (v) changes.push(id + "=" + v);
  at("scaled").textContent = size(needed) + ", " + found.step_seconds.toPrecision(3) + " s a step" +
    (data.memory ? (needed <= data.memory ? ": fits" : ": does not fit") : "");
  const most = total(found);
  at("parts").replaceChildren(...data.names.map((c, n) => { const i = document.createElement("i");
    i.style.width = 100 * found[c] / most + "%"; i.style.background = data.colors[n]; i.title = c + " " + size(found[c]);
    return i; }));
  at("command").textContent = "--what-if " + changes.join(","); at("runs").hidden = !changes.length; };
for (const id of ["batch", "sequence", "stage", "checkpoint"]) if (at(id)) at(id).addEventListener("input", show);
show();
"""


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
label { display: block; margin: .4rem 0; } input[type=range] { width: min(100%, 24rem); vertical-align: middle; }
.parts { display: flex; height: 1.2rem; background: var(--card); border-radius: 4px; overflow: hidden; }
"""

_SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const size = n => { const u = ["B", "KiB", "MiB", "GiB", "TiB"]; let i = 0; while (n >= 1024 && i < 4) { n /= 1024; i++; }
  return n.toFixed(i ? 2 : 0) + " " + u[i]; };
"""


def page(estimate: Estimate, title: str, sliders: dict[str, Any] | None = None) -> str:
    """The page's HTML.

    Args:
        estimate: what ``vescale.estimate`` returned.
        title: of the page.
        sliders: other choices, from :func:`sliders_of`; None: the page has no sliders.
    """
    peak = estimate.peak
    sums = {name: _sum(size) for name, size in peak.categories.items()}
    data = {
        "rows": sliders,
        "names": list(CATEGORIES),
        "colors": _COLORS,
        "memory": estimate.device.memory_bytes,
        "gpu": estimate.device.is_gpu,
        "outside": sum(estimate.outside.values()),
    }
    verdict = "It fits" if estimate.fits else "It does not fit"
    key = "".join(f"<span><i style='background:{c}'></i>{n}</span>" for n, c in zip(CATEGORIES, _COLORS))
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{verdict}: {bytes_text(estimate.needed_bytes)} on rank {estimate.peak_rank} of {escape(str(estimate.axes))} "
        f"({escape(estimate.device.name)}); the peak is at <b>{escape(peak.peak_at)}</b>. A step takes "
        f"{estimate.step_seconds:.4g} s: {estimate.time.mfu:.1%} of the device's peak.</p>",
        f"<h2>Memory during a step</h2><div class=key>{key}</div>{_areas(peak.timeline)}",
        "<h2>At the peak</h2>"
        + _table(("category", "bytes", ""), [(n, f"{v:,}", bytes_text(v)) for n, v in sums.items()]),
        "<h2>Activations by module</h2>" + _bars(peak.categories["activations"]),
        "<h2>Ranks</h2>" + _bars({_ranks(r.ranks): r.peak_bytes for r in estimate.ranks}),
        "<h2>Collectives</h2>"
        + _table(
            ("axes and op", "bytes", "seconds"),
            [
                (n, bytes_text(t["bytes"]), f"{t['seconds']:.4g}")
                for n, t in estimate.time.terms()["collectives"].items()
            ],
        ),
        sliders_text(sliders) if sliders else "",
    ]
    for name, table in (("what_if", estimate.what_if), ("stage", estimate.zero_table)):
        if table:
            parts.append(_table((name.replace("_", " "), "peak", "seconds", ""), [_row(name, row) for row in table]))
    parts += [f"<p class=muted>{escape(note)}</p>" for note in estimate.notes]
    script = _SCRIPT + SLIDERS_SCRIPT if sliders else ""
    text = json.dumps(data).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}"
        f'<script type="application/json" id="data">{text}</script><script>{script}</script></body></html>\n'
    )


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return row[name], "", "", row["error"]
    return (
        row[name],
        bytes_text(row["peak_bytes"]),
        f"{row['step_seconds']:.4g}",
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


def _sum(size: Any) -> int:
    return sum(size.values()) if isinstance(size, dict) else int(size)
