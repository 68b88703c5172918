"""Draws plots as SVG: no ids, no style attributes, text in the page's colour, so a page can hold many, light or dark.

A picture of 1,000 steps takes a few milliseconds and at most some 20 KB, so an open page costs a run that trains little.
"""

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from entente.telemetry.progress import shorten

BLUE, ORANGE, GREEN, PURPLE, GREY = "#3d85c6", "#e0852f", "#3c9f73", "#a06cc4", "#8b929c"
TEAL, RED, YELLOW, BROWN = "#2f9fb3", "#d0605e", "#c9a227", "#9c6b4a"
PINK, NAVY = "#d98cb3", "#4a5a8a"
"""Mid tones, visible on light and dark backgrounds and with colour blindness."""
WIDE, LINE = 560.0, 19.0
"""Width of a picture, and height of a line of text, in SVG units."""
_LETTER, _DIGIT, _MARGIN, _RIGHT = 6.7, 8.0, 64.0, 12.0
"""`_LETTER`, `_DIGIT`: widths of a letter in the mean, and of the widest digits, so that no number meets what is beside it."""
_FEW, _MANY = 60, 240
"""Up to `_FEW` points have dots; more than `_MANY` are joined before they are drawn."""
_LONGEST = 40
Values = Sequence[float] | np.ndarray


@dataclass(kw_only=True)
class Panel:
    """One pair of axes; the panels of a plot share the horizontal one. Marks draw themselves, given both scales."""

    label: str
    high: float = 170.0
    per_cent: bool = False
    log: bool = False
    low: float | None = None
    top: float | None = None
    names: list[tuple[str, str, bool]] = field(default_factory=list)
    """Name, colour, whether dashed, of what the legend lists."""
    marks: list[Callable[[Callable[[float], float], Callable[[float], float]], str]] = field(default_factory=list)
    rules: list[float] = field(default_factory=list)
    """Heights of lines across the whole panel."""
    seen: list[float] = field(default_factory=list)
    """Vertical values, for the range."""
    across: list[float] = field(default_factory=list)

    def line(self, xs: Values, ys: Values, colour: str, name: str = "", *, dashed: bool = False) -> None:
        x, y = np.asarray(xs, float), np.asarray(ys, float)
        self._take(x, y, name, colour, dashed)
        x, y = _thinned(x, y)
        points = list(zip(x.tolist(), y.tolist(), strict=True))
        dash = ' stroke-dasharray="6 4"' if dashed else ""

        def mark(across: Callable[[float], float], up: Callable[[float], float]) -> str:
            parts, dots, follows = list[str](), list[tuple[str, str]](), False
            every = len(x) <= _FEW and not dashed
            for place, (value, height) in enumerate(points):
                if follows_on := math.isfinite(height):
                    at = f"{across(value):.1f}", f"{up(height):.1f}"
                    parts.append(("L" if follows else "M") + " ".join(at))
                    goes_on = place + 1 < len(points) and math.isfinite(points[place + 1][1])
                    dots += [at] if every or not (follows or goes_on) else []  # alone, a point is no line
                follows = follows_on
            drawn = f'<path d="{"".join(parts)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
            return drawn + "".join(f'<circle cx="{cx}" cy="{cy}" r="2.6" fill="{colour}"/>' for cx, cy in dots)

        self.marks.append(mark)

    def band(self, xs: Values, lows: Values, highs: Values, colour: str, name: str = "") -> None:
        x, low, high = (np.asarray(values, float) for values in (xs, lows, highs))
        self._take(np.concatenate([x, x]), np.concatenate([low, high]), name, colour, False)
        bounds = zip(x.tolist(), low.tolist(), high.tolist(), strict=True)
        known = [each for each in bounds if math.isfinite(each[1]) and math.isfinite(each[2])]

        def mark(across: Callable[[float], float], up: Callable[[float], float]) -> str:
            if len(known) == 1:
                ((place, bottom, top),) = known
                return _stroke(f"M{across(place):.1f} {up(bottom):.1f}V{up(top):.1f}", colour, 3, 0.45)
            edge = [(place, top) for place, _, top in known] + [(place, bottom) for place, bottom, _ in reversed(known)]
            return _filled("L".join(f"{across(a):.1f} {up(b):.1f}" for a, b in edge), colour, 0.18) if edge else ""

        self.marks.append(mark)

    def stack(self, parts: Sequence[tuple[str, str, Values]]) -> None:
        """Areas of equal steps from 1, one on another."""
        steps = len(parts[0][2])
        edges = np.unique(np.linspace(0, steps, min(steps, _MANY) + 1).round().astype(int))
        below = np.zeros(len(edges) - 1)
        for name, colour, values in parts:
            filled = np.nan_to_num(np.asarray(values, float))
            top = below + np.array([filled[a:b].mean() for a, b in pairwise(edges)])
            self._take(edges + 0.5, np.append(top, 0.0), name, colour, False)
            self.marks.append(_stairs(edges + 0.5, below, top, colour))
            below = top

    def rule(self, y: float) -> None:
        self.rules.append(y)

    def ticks(self) -> tuple[tuple[float, float], list[tuple[float, str]]]:
        """(lowest and highest value of the axis, its ticks), in powers of 10 with `log`."""
        low, high = _widened([self.scale(value) for value in self.seen], 0.05)
        low, high = low if self.low is None else self.low, high if self.top is None else self.top
        times = 100 if self.per_cent else 1
        ticks = _ticks(times * low, times * high, 6, powers=self.log)
        if self.log and len(ticks) < 2:  # too few powers of 10 for a scale
            between = _ticks(10.0**low, 10.0**high, 4)
            ticks = [(math.log10(value), text) for value, text in between if value > 0]
        return (low, high), [(value / times, text + "%" * self.per_cent) for value, text in ticks]

    def scale(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else float(value)

    def _take(self, x: np.ndarray, y: np.ndarray, name: str, colour: str, dashed: bool) -> None:
        self.seen += y[np.isfinite(y)].tolist()
        self.across += x.tolist()
        if name:
            self.names.append((name, colour, dashed))


def plot(panels: Sequence[Panel], x_label: str, alt: str, *, steps: int = 0) -> str:
    """`alt`: the description; `steps`: the horizontal axis goes from step 1 to this one; 0: as far as there are values."""
    left, right = (0.4, steps + 0.6) if steps else _widened([value for panel in panels for value in panel.across], 0.02)
    margin = max([_MARGIN, *(len(text) * _DIGIT + LINE + 7 for panel in panels for _, text in panel.ticks()[1])])
    across = _scale(left, right, margin, WIDE - _RIGHT)
    drawn, at = list[str](), 0.0
    for panel in panels:
        legend, at = _legend(panel.names, at)
        drawn += [*legend, *_panel(panel, at + 8, across, margin)]
        at += panel.high + 22
    for value, text in _ticks_apart(left, right, 9, across, whole=True):
        drawn.append(_text(text, across(value), at + 4, "middle"))
    drawn.append(_text(x_label, (margin + WIDE - _RIGHT) / 2, at + LINE + 3, "middle"))
    return picture("".join(drawn), at + LINE + 10, alt)


def rows_plot(
    rows: Sequence[tuple[str, float, tuple[float, float] | None, str, str]],
    label: str,
    alt: str,
    *,
    line: float | None = None,
    bars: bool = False,
    ends: tuple[float, float] | None = None,
) -> str:
    """A row for each (name, value, interval, colour, words), as a dot with its interval, or as a bar from 0."""
    names = [shorten(name, _LONGEST) for name, *_ in rows]
    margin = min(max(map(len, names)) * _LETTER + 14, 0.55 * WIDE)
    values = [value for _, mean, interval, *_ in rows for value in (mean, *(interval or ()))]
    left, right = ends or _widened([*values, *([] if line is None else [line])], 0.12)
    across, step = _scale(left, right, margin, WIDE - _RIGHT - 20), 2 * LINE if not bars else 1.5 * LINE
    high, drawn = len(rows) * step + 6, list[str]()
    for value, text in _ticks_apart(left, right, 6, across):
        drawn.append(_stroke(f"M{across(value):.1f} 4V{high:.1f}", "currentColor", 0.8, 0.14))
        drawn.append(_text(text, across(value), high + LINE - 2, "middle"))
    if line is not None:
        drawn.append(_stroke(f"M{across(line):.1f} 4V{high:.1f}", "currentColor", 1, 0.4))
    for place, (name, (_, value, interval, colour, words)) in enumerate(zip(names, rows, strict=True)):
        y = (place + (0.5 if bars else 0.7)) * step
        drawn.append(_text(name, margin - 10, y + 4, "end"))
        if bars:
            drawn.append(_filled(f"{across(0):.1f} {y - 8:.1f}H{across(value):.1f}V{y + 8:.1f}H{across(0):.1f}", colour, 1))
            drawn.append(_text(words, across(value) + 6, y + 4, "start"))
            continue
        if interval is not None:
            drawn.append(_stroke(f"M{across(interval[0]):.1f} {y:.1f}H{across(interval[1]):.1f}", colour, 4, 0.45))
        drawn.append(f'<circle cx="{across(value):.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')
        drawn.append(_text(words, across(value), y - 9, "middle"))
    drawn.append(_text(label, (margin + WIDE - _RIGHT) / 2, high + 2 * LINE, "middle"))
    return picture("".join(drawn), high + 2 * LINE + 8, alt)


def picture(drawn: str, high: float, alt: str) -> str:
    return (
        f'<svg role="img" aria-label="{_plain(alt)}" viewBox="0 0 {WIDE:.0f} {high:.0f}" font-size="12.5" '
        f'stroke-linejoin="round" xmlns="http://www.w3.org/2000/svg">{drawn}</svg>'
    )


def stand_alone(svg: str) -> str:
    """The picture as a file of its own, on a white card."""
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None, "every plot has a view box"
    opening, rest = svg.split(">", 1)
    opening = opening.replace("<svg", f'<svg width="{size[1]}" height="{size[2]}" color="#24292f" font-family="sans-serif"', 1)
    return f'{opening}><rect width="{size[1]}" height="{size[2]}" fill="#ffffff"/>{rest}\n'


def _panel(panel: Panel, top: float, across: Callable[[float], float], margin: float) -> list[str]:
    (low, high), ticks = panel.ticks()
    level = _scale(low, high if high > low else low + 1, top + panel.high, top)
    drawn = []
    for value, text in ticks:
        y = level(value)
        drawn.append(_stroke(f"M{margin:.1f} {y:.1f}H{WIDE - _RIGHT}", "currentColor", 0.8, 0.14))
        drawn.append(_text(text, margin - 7, y + 4, "end"))
    drawn += [mark(across, lambda value: level(panel.scale(value))) for mark in panel.marks]
    for value in panel.rules:
        y = level(panel.scale(value))
        drawn.append(_stroke(f"M{margin:.1f} {y:.1f}H{WIDE - _RIGHT}", "currentColor", 1, 0.4))
    drawn.append(_stroke(f"M{margin:.1f} {top:.1f}V{top + panel.high:.1f}H{WIDE - _RIGHT}", "currentColor", 1, 0.5))
    middle = top + panel.high / 2
    words = _text(panel.label, 11, middle, "middle")
    return [*drawn, words.replace("<text", f'<text transform="rotate(-90 11 {middle:.1f})"', 1)]


def _stairs(edges: np.ndarray, below: np.ndarray, top: np.ndarray, colour: str) -> Callable[..., str]:
    def mark(across: Callable[[float], float], up: Callable[[float], float]) -> str:
        there = [f"{across(edges[0]):.1f} {up(below[0]):.1f}"]
        there += [f"V{up(value):.1f}H{across(edge):.1f}" for value, edge in zip(top, edges[1:], strict=True)]
        back = [f"V{up(value):.1f}H{across(edge):.1f}" for value, edge in zip(below[::-1], edges[-2::-1], strict=True)]
        return _filled("".join([*there, *back]), colour, 1)

    return mark


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest of each of few ranges, in their order, so that no peak is lost."""
    if len(x) <= _MANY:
        return x, y
    places = []
    for part in np.array_split(np.arange(len(x)), _MANY // 2):
        known = part[np.isfinite(y[part])]
        places += sorted({int(known[y[known].argmin()]), int(known[y[known].argmax()])}) if len(known) else [int(part[0])]
    return x[places], y[places]


def _legend(names: Sequence[tuple[str, str, bool]], top: float) -> tuple[list[str], float]:
    drawn, x, y = list[str](), _MARGIN, top + LINE
    for name, colour, dashed in names:
        name = shorten(name, int((WIDE - _MARGIN - 40) / _LETTER))
        wide = len(name) * _LETTER + 40
        if x > _MARGIN and x + wide > WIDE:
            x, y = _MARGIN, y + LINE
        drawn.append(_stroke(f"M{x:.1f} {y - 4:.1f}h16", colour, 4, 1, "5 3" if dashed else ""))
        drawn.append(_text(name, x + 22, y, "start"))
        x += wide
    return drawn, y if names else top


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _widened(values: Sequence[float], share: float) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    room = (high - low) * share or max(abs(high) * share, 0.5)
    return low - (room if low or high == low else 0), high + room


def _ticks(low: float, high: float, most: int, *, whole: bool = False, powers: bool = False) -> list[tuple[float, str]]:
    """Values at equal distances, and their exact texts."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * by for by in (1, 2, 2.5, 5, 10) if (high - low) / (size * by) <= most)
    step = max(1.0, round(step)) if whole or powers else step
    digits = next((digits for digits in range(12) if abs(step - round(step, digits)) < step * 1e-6), 12)
    values = [round(count * step, digits) for count in range(math.ceil(low / step), math.floor(high / step) + 1)]
    greatest = max(abs(low), abs(high))
    comma = "," if greatest >= 10_000 else ""  # a year has none
    form = f"{comma}.{digits}f" if digits <= 4 and greatest < 1e7 else ".4g"
    texts = [f"{10.0**value:g}" if powers else f"{value:{form}}" for value in values]
    return list(zip(values, (text.replace("-", "−") for text in texts), strict=True))


def _ticks_apart(
    low: float, high: float, most: int, across: Callable[[float], float], *, whole: bool = False
) -> list[tuple[float, str]]:
    """As many ticks of a horizontal axis as fit side by side, up to `most`."""
    for count in range(most, 1, -1):
        ticks = _ticks(low, high, count, whole=whole)
        if all(across(b) - across(a) > (len(first) + len(text)) / 2 * _DIGIT for (a, first), (b, text) in pairwise(ticks)):
            return ticks
    return _ticks(low, high, 1, whole=whole)


def _stroke(path: str, colour: str, wide: float, share: float, dash: str = "") -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{wide}" stroke-opacity="{share}"{dashes}/>'


def _filled(path: str, colour: str, share: float) -> str:
    return f'<path d="M{path}Z" fill="{colour}" fill-opacity="{share}"/>'


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{_plain(text)}</text>'


def _plain(text: str) -> str:
    return html.escape(shorten(text, 1000))
