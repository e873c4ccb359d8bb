"""Charts as SVG: lines and bars by name. Colours differ from white by a contrast of 3:1 or more.

With dashes, 18 lines are distinct."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from math import floor, log10
from typing import Final

_COLOURS: Final = ("#0072b2", "#d55e00", "#007a5a", "#aa3377", "#7a6200", "#444444")
_DASHES: Final = ("none", "9 5", "2 3")
_WIDTH: Final = 720
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 84, 36, 424, 250
_HEIGHT: Final = _TOP + _PLOT_HEIGHT + 48
_BAR: Final = 26
_NAMES: Final = 160

Point = tuple[float, float]


def ticks(highest: float) -> list[float]:
    """From 0 in four to ten equal steps of 1, 2 or 5 times a power of ten; the last one is `highest` or more."""
    if highest <= 0:
        return [0.0, 1.0]
    magnitude = 10.0 ** floor(log10(highest))
    step = next(each * magnitude for each in (0.1, 0.2, 0.5, 1) if highest <= 8 * each * magnitude or each == 1)
    return [round(step * number, 10) for number in range(1 + -floor(-round(highest / step, 6)))]


def lines(title: str, x_title: str, y_title: str, series: Mapping[str, Sequence[Point]], *, steps: bool = False) -> str:
    """`steps`: a value holds until the next point."""
    xs, ys = (ticks(max((point[axis] for points in series.values() for point in points), default=0)) for axis in (0, 1))
    bottom, right = _TOP + _PLOT_HEIGHT, _LEFT + _PLOT_WIDTH
    parts = _columns(xs, _LEFT, _PLOT_WIDTH, bottom)
    for y in ys:
        at = bottom - _PLOT_HEIGHT * y / ys[-1]
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{right}"/>{_text(_LEFT - 6, at + 4, _number(y), "end")}')
    parts.append(_text(_LEFT + _PLOT_WIDTH / 2, bottom + 38, x_title, "middle"))
    parts.append(f'<g transform="translate(16 {_TOP + _PLOT_HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_title, "middle")}</g>')
    for number, (name, points) in enumerate(series.items()):
        spots = [(_LEFT + _PLOT_WIDTH * x / xs[-1], bottom - _PLOT_HEIGHT * y / ys[-1]) for x, y in points]
        path = "".join(f"M{x:.1f} {y:.1f}" for x, y in spots[:1])
        path += "".join(f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for _, (x, y) in pairwise(spots))
        at = _TOP + 10 + 19 * number
        parts.append(f'<path {_stroke(number)} d="{path}"/><path {_stroke(number)} d="M{right + 16} {at}h30"/>')
        parts.append(_text(right + 52, at + 4, name))
    return _figure(title, max(_HEIGHT, _TOP + 20 + 19 * len(series)), "".join(parts))


def bars(title: str, unit: str, values: Mapping[str, float]) -> str:
    """One bar for each name, with its value."""
    xs = ticks(max(values.values(), default=0))
    bottom, width = _TOP + _BAR * len(values), _WIDTH - _NAMES - 70
    parts = _columns(xs, _NAMES, width, bottom)
    for number, (name, value) in enumerate(values.items()):
        top, length = _TOP + _BAR * number, width * value / xs[-1]
        colour = _COLOURS[number % len(_COLOURS)]
        parts.append(f'<rect x="{_NAMES}" y="{top + 4}" width="{length:.1f}" height="{_BAR - 8}" fill="{colour}"/>')
        parts.append(_text(_NAMES - 8, top + 18, name, "end"))
        parts.append(_text(_NAMES + length + 6, top + 18, f"{value:,.{2 if value < 1000 else 0}f}"))
    parts.append(_text(_NAMES + width / 2, bottom + 36, unit, "middle"))
    return _figure(title, bottom + 46, "".join(parts))


def _columns(xs: Sequence[float], left: int, width: int, bottom: int) -> list[str]:
    """Vertical lines with their values."""
    places = [(left + width * x / xs[-1], x) for x in xs]
    return [
        f'<path class="grid" d="M{at:.1f} {_TOP}V{bottom}"/>{_text(at, bottom + 16, _number(x), "middle")}' for at, x in places
    ]


def _figure(title: str, height: int, content: str) -> str:
    label = escape(title)
    heading = _text(0, 16, title, "start title")
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}"><title>{label}</title>{heading}{content}</svg>'


def _text(x: float, y: float, text: str, style: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{style}">{escape(text)}</text>'


def _stroke(number: int) -> str:
    """Dashes of adjacent lines differ too, because lines may cover each other."""
    dash = _DASHES[(number + number // len(_COLOURS)) % len(_DASHES)]
    return f'class="line" stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-dasharray="{dash}"'


def _number(value: float) -> str:
    return f"{value:,.10g}"
