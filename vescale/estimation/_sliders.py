"""What the page's sliders show: estimates of other batches, sequences, stages and checkpointing, and how they add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vescale.estimation._estimate import Estimate
from vescale.estimation._variants import changed, row_of

__all__ = ["SLIDERS_SCRIPT", "sliders_of", "sliders_text"]

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
