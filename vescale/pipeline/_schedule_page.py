"""A schedule as one HTML page without external assets: a row for each rank, a column for each unit of time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vescale.pipeline._schedule import DURATIONS, Schedule

__all__ = ["schedule_page"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 30, 26, 64, 24
_STYLE = """
:root { color-scheme: light dark }
body { font: 14px system-ui, sans-serif; margin: clamp(.8rem, 3vw, 2rem); } p { max-width: 60rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right; white-space: nowrap }
th { border-bottom: 1px solid #8888 } td:first-child, th:first-child { text-align: left }
.scroll { overflow-x: auto } svg { font: 11px system-ui, sans-serif }
svg text { fill: currentColor } svg .in { fill: #111 } svg rect { stroke: #fff8 }
.legend span { display: inline-block; padding: .1rem .5rem; margin: 0 .5rem .3rem 0; color: #111 }
"""
_KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def schedule_page(
    schedule: Schedule, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> str:
    """``head`` and ``rows``: a table that stands above the drawing, and ``note`` below it. Empty
    fields are times at which a rank waits.

    Args:
        schedule: what :func:`make_schedule` returned.
        title: of the page.
    """
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    used = {action.kind for actions in schedule.actions for action in actions}
    legend = "".join(
        f'<span style="background:{_color(0, kind, 1)}">{kind} {name}, {DURATIONS[kind]}</span>'
        for kind, name in _KINDS.items()
        if kind in used
    )
    facts = (
        f"{schedule.num_stages} stages on {len(schedule.actions)} ranks, {schedule.num_microbatches} micro-batches; "
        f"{schedule.length} units of time, of which a rank waits {schedule.bubble:.1%} on average; at most "
        f"{', '.join(map(str, schedule.peak))} forwards are held for backward (by rank)."
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<p>{facts}</p>\n"
        f'<div class="scroll"><table><tr>{cells}</tr>{body}</table></div>\n<p>{escape(note)}</p>\n'
        f'<p class="legend">{legend} Each field: the stage, the kind, the micro-batch; shades tell stages apart.</p>\n'
        f'<div class="scroll">{_drawing(schedule)}</div>\n</body></html>\n'
    )


def _drawing(schedule: Schedule) -> str:
    width = _LEFT + schedule.length * _WIDTH + 8
    height = _TOP + len(schedule.actions) * _HEIGHT + 4
    step = max(1, -(-schedule.length // 24))
    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="schedule {escape(schedule.name)}">']
    parts += [f'<text x="{_LEFT + t * _WIDTH}" y="14">{t}</text>' for t in range(0, schedule.length + 1, step)]
    for rank, (actions, starts) in enumerate(zip(schedule.actions, schedule.starts)):
        top = _TOP + rank * _HEIGHT
        parts.append(f'<text x="0" y="{top + 17}">rank {rank}</text>')
        for action, start in zip(actions, starts):
            left, long = _LEFT + start * _WIDTH, DURATIONS[action.kind] * _WIDTH
            color = _color(action.stage, action.kind, schedule.num_stages)
            what = f"{_KINDS[action.kind]} of stage {action.stage}, micro-batch {action.microbatch}, at {start}"
            parts.append(
                f'<g><title>{what}</title><rect x="{left}" y="{top}" width="{long}" height="{_HEIGHT - 2}" fill="{color}"/>'
                f'<text class="in" x="{left + long / 2}" y="{top + 16}" text-anchor="middle">{action}</text></g>'
            )
    return "".join((*parts, "</svg>"))


def _color(stage: int, kind: str, num_stages: int) -> str:
    hue = {"F": 210, "B": 140, "I": 140, "W": 45}[kind]
    return f"hsl({hue} 60% {86 - 30 * stage // max(1, num_stages)}%)"
