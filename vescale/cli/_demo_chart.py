"""The demo's loss curves as one self-contained SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["loss_chart"]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 64, 52


def loss_chart(one_device: Sequence[float], mesh: Sequence[float], mesh_name: str, difference: float) -> str:
    """Both curves over the steps: one device as a wide band, the mesh as a thin line on it."""
    low, high = min([*one_device, *mesh]), max([*one_device, *mesh])
    step = _nice_step((high - low) or 1.0, 5)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step) * step
    top = top if top > bottom else bottom + step
    last = max(len(one_device) - 1, 1)

    def x(index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * index / last

    def y(value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (top - value) / (top - bottom)

    def line(values: Sequence[float]) -> str:
        return " ".join(f"{x(i):.1f},{y(v):.1f}" for i, v in enumerate(values))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#333">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="600">Training loss, one device and {mesh_name}</text>',
        f'<text x="{_LEFT}" y="46" fill="#666">largest relative difference over {len(mesh)} steps: {difference:.1e}</text>',
    ]
    for index in range(round((top - bottom) / step) + 1):
        value = bottom + index * step
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e4e4e4"/>'
            f'<text x="{_LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.{_decimals(step)}f}</text>'
        )
    tick = max(1, round(_nice_step(last, 8)))
    for index in range(0, last + 1, tick):
        parts.append(f'<text x="{x(index):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{index}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    legend = _WIDTH - _RIGHT - 220
    parts += [
        f'<text x="{middle:.0f}" y="{_HEIGHT - 12}" text-anchor="middle">step</text>',
        f'<text transform="translate(18 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle">loss</text>',
        f'<polyline points="{line(one_device)}" fill="none" stroke="#f2b84b" stroke-width="8" stroke-linejoin="round"/>',
        f'<polyline points="{line(mesh)}" fill="none" stroke="#1f4e9c" stroke-width="2" stroke-linejoin="round"/>',
        f'<line x1="{legend}" x2="{legend + 28}" y1="{_TOP + 14}" y2="{_TOP + 14}" stroke="#f2b84b" stroke-width="8"/>',
        f'<text x="{legend + 38}" y="{_TOP + 18}">one device</text>',
        f'<line x1="{legend}" x2="{legend + 28}" y1="{_TOP + 36}" y2="{_TOP + 36}" stroke="#1f4e9c" stroke-width="2"/>',
        f'<text x="{legend + 38}" y="{_TOP + 40}">{mesh_name}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _nice_step(span: float, count: int) -> float:
    """A round step (1, 2 or 5 times a power of ten) that divides ``span`` into about ``count``."""
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if rough <= power * factor)


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step)))
