"""SVG plot of ``moe bench``: times and floor over token counts, on logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from moe_core.errors import printable

WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 56, 48
#: colors that color-blind readers can distinguish
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: minimum distance in pixels between two labels of an axis
CLEAR = 30


@dataclass(frozen=True)
class _Axis:
    """Map logarithmic values to pixel positions."""

    low: float
    high: float
    first: float
    last: float

    @staticmethod
    def over(values: Sequence[float], first: float, last: float) -> _Axis:
        """Make an axis over the values with a margin on both sides."""
        return _Axis(min(values) / 1.15, max(values) * 1.15, first, last)

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.first + share * (self.last - self.first), 1)

    def clear(self, values: Sequence[float]) -> Iterator[float]:
        """Yield the values, in order, whose labels do not overlap."""
        before = None
        for value in values:
            if before is None or abs(self.at(value) - before) >= CLEAR:
                before = self.at(value)
                yield value


def svg(data: dict[str, Any]) -> str:
    """Return the SVG of ``moe bench`` results.

    It has a line per backend, bars from the 10th to the 90th percentile, and the floor.
    """
    results = sorted(data["results"], key=lambda result: int(result["tokens"]))
    counts = list(dict.fromkeys(result["tokens"] for result in results))
    times = [t for r in results for t in (*r["seconds_p10_p90"], r["seconds"], r["floor_seconds"])]
    x = _Axis.over(counts, LEFT, WIDTH - RIGHT)
    y = _Axis.over(times, HEIGHT - BOTTOM, TOP)
    lines = [*_head(data), *_axes(x, y, counts)]
    floor = {result["tokens"]: result["floor_seconds"] for result in results}
    shown = [("floor", "#000000", [(count, floor[count]) for count in counts])]
    for number, backend in enumerate(dict.fromkeys(result["backend"] for result in data["results"])):
        mine = [result for result in results if result["backend"] == backend]
        color = COLOURS[number % len(COLOURS)]
        shown.append((backend, color, [(r["tokens"], r["seconds"]) for r in mine]))
        for result in mine:
            low, high = result["seconds_p10_p90"]
            at = x.at(result["tokens"])
            lines.append(_line(at, y.at(low), at, y.at(high), color))
            lines.append(f'<circle cx="{at}" cy="{y.at(result["seconds"])}" r="3" fill="{color}"/>')
    for number, (name, color, points) in enumerate(shown):
        dashes = ' stroke-dasharray="5 4"' if number == 0 else ""
        path = " ".join(f"{x.at(count)},{y.at(seconds)}" for count, seconds in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}/>')
        row, start = TOP + 10 + 20 * number, WIDTH - RIGHT + 14
        lines.append(_line(start, row, start + 22, row, color, dashes))
        lines.append(_text(start + 28, row + 4, name, "start"))
    return "\n".join([*lines, "</svg>", ""])


def _head(data: dict[str, Any]) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    yield _text(LEFT, 22, f"{data['scheme']}, {data['layer']}", "start", 14)
    yield _text(LEFT, 40, f"{data['device_name']}, torch {data['torch']}", "start")


def _axes(x: _Axis, y: _Axis, counts: Sequence[int]) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    exponents = range(math.floor(math.log10(y.low)), math.ceil(math.log10(y.high)) + 1)
    ticks = [step * 10.0**exponent for exponent in exponents for step in (1, 2, 5)]
    for value in y.clear([tick for tick in ticks if y.low <= tick <= y.high]):
        yield _line(LEFT, y.at(value), right, y.at(value), "#dddddd")
        yield _text(LEFT - 8, y.at(value) + 4, f"{1e6 * value:g}", "end")
    for count in counts:
        yield _line(x.at(count), TOP, x.at(count), bottom, "#eeeeee")
    for value in x.clear(counts):
        yield _text(x.at(value), bottom + 18, f"{value:.0f}", "middle")
    yield f'<rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}" fill="none" stroke="#888888"/>'
    yield _text((LEFT + right) / 2, HEIGHT - 10, "tokens", "middle")
    yield (
        f'<text x="18" y="{(TOP + bottom) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 18 {(TOP + bottom) / 2})">µs per call</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    """Return a text element.

    ``text`` may come from a file, so characters that are invalid in XML are escaped.
    """
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}">{escape(printable(text))}</text>'
