"""Pictures of boards as SVG: our sketch map with owners, units and orders.

A picture has a few tens of KB and no ids or scripts, so one page can hold many. A thicker arrow means a more probable order.
Colours are attributes; the style sheet changes only ground colours for dark pages. The engine's map artwork is not used, because
of its licence.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from entente.game.board import Board
from entente.game.sketch_map import CLOSED, HEIGHT, LAND, SEA, WIDTH, Cell, Point, cells, name_place, place
from entente.game.snapshot import POWERS

Frame = tuple[float, float, float, float]
"""Left, top, width and height of the visible part, in SVG units."""

COLOURS: dict[str, str] = dict(
    zip(POWERS, ("#c8443a", "#7c4fb0", "#3778c2", "#4d545c", "#2f9457", "#7d8ea3", "#cf9a12"), strict=True)
)
"""Colour of each power's units; its provinces have a lighter mix of it."""
_FREE, _SEA, _CLOSED = "#efeadd", "#d7e6ee", "#c9c4b8"
_INK, _SHAPE = "#20262d", 4 / 3  # _SHAPE is width / height
UNITS_ACROSS = 58
"""Half widths of a unit in the width of a picture; `board.js` has the same."""
_MARGIN = 75.0
_DARK_GROUND = "#22262b"
_DARK = {
    "sea": "fill:#1c2a35;stroke:#1c2a35", "free": "fill:#3b3b37;stroke:#3b3b37", "closed": "fill:#2a2b2c;stroke:#2a2b2c",
    "sea-line": "stroke:#2a3d4b", "land-line": "stroke:#14171b", "coast-line": "stroke:#55768b",
    "edge": "stroke:#14171b", "tip": "fill:#14171b;stroke:#14171b", "ring": "stroke:#dfe5ea", "none": "fill:#14171b",
    "name": "fill:#dfe5ea;stroke:#14171b", "words": "fill:#dfe5ea", "legend": "fill:#1b1f25",
}  # fmt: skip
_LEGEND = {"arrow": "move or retreat", "line": "support or convoy", "ring": "hold", "build": "build", "cross": "disband"}
_SAMPLE = "#7d838a"
_LETTER, _LEGEND_HEIGHT = 0.46, 2.4
"""Mean width of a letter in the legend, and the legend's height, in half widths of a unit."""
_NAMES, _SEAS = frozenset(LAND | SEA), frozenset(SEA)


def frame_around(locations: Iterable[str]) -> Frame:
    places = [place(location) for location in locations]
    left, right = min(x for x, _ in places) - _MARGIN, max(x for x, _ in places) + _MARGIN
    top, bottom = min(y for _, y in places) - _MARGIN, max(y for _, y in places) + _MARGIN
    width = min(max(right - left, (bottom - top) * _SHAPE, 300.0), WIDTH, HEIGHT * _SHAPE)
    height = width / _SHAPE
    x = min(max((left + right - width) / 2, 0.0), WIDTH - width)
    y = min(max((top + bottom - height) / 2, 0.0), HEIGHT - height)
    return x, y, width, height


def order_locations(board: Board, power: str, orders: Sequence[str]) -> set[str]:
    named = {word for order in orders for word in order.split() if word.split("/")[0] in _NAMES}
    # A power without units that waives all builds has its centres alone.
    return named | {unit[2:] for unit in board.units()[power]} or set(board.centres()[power])


def draw_board(
    board: Board,
    orders: Mapping[str, Sequence[str]] | None = None,
    *,
    certainty: Mapping[str, float] | None = None,
    frame: Frame = (0.0, 0.0, WIDTH, HEIGHT),
) -> str:
    """The board as SVG with the `orders` of each power. `certainty`: probability per order text, 1 without an entry."""
    x, y, width, height = frame
    size = width / UNITS_ACROSS  # half the width of a unit; text and lines scale with it
    visible = [cell for cell in cells() if _meets(cell, frame)]
    drawn = [*_ground(board, visible, size), *_units(board, size)]
    kinds: set[str] = set()
    for power, own in (orders or {}).items():
        for order in own:
            drawn += _order(order, COLOURS[power], (certainty or {}).get(order, 1.0), size)
            kinds |= {_kind(order)} - {""}
    drawn += _names(board, visible, size, frame)
    if kinds:
        drawn.append(_legend(kinds, bool(certainty), size, (x, y + height), width))
        height += size * _LEGEND_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{x:.1f} {y:.1f} {width:.1f} {height:.1f}" '
        f'width="600" height="{600 * height / width:.0f}" font-family="sans-serif" text-anchor="middle">'
        f"{_STYLE}{''.join(drawn)}</svg>\n"
    )


def draw_empty_map() -> tuple[str, str]:
    """Ground and names of the whole sketch as SVG elements without colours; the page's style sheet gives them.

    Ground has class `g` and the province in `data-p`. Lines have `sea-line`, `land-line` and `coast-line`. The ring of a supply
    centre has class `sc` and its name in `data-c`. A province's abbreviation has class `name`.
    """
    grounds: dict[tuple[str, str], list[str]] = {}
    size = WIDTH / UNITS_ACROSS
    for cell in cells():
        kind = "closed" if cell.name in CLOSED else "sea" if cell.is_sea else "free"
        grounds.setdefault((cell.name, kind), []).append(_outline(cell.corners))
    drawn = [f'<path class="g {kind}" data-p="{name}" d="{"".join(parts)}"/>' for (name, kind), parts in grounds.items()]
    drawn += [f'<path class="{kind}-line" d="{path}"/>' for kind, path in _lines(cells()).items()]
    centres = frozenset(Board.start().free_centres()) | {centre for own in Board.start().centres().values() for centre in own}
    names = []
    for name in (*LAND, *SEA):
        x, y = name_place(name, size)
        if name in centres:
            names.append(f'<circle class="sc" data-c="{name}" cx="{x - size * 1.0:.1f}" cy="{y:.1f}" r="5"/>')
            x += size * 0.2
        names.append(f'<text class="name" x="{x:.1f}" y="{y + size * 0.3:.1f}">{name}</text>')
    return "".join(drawn), "".join(names)


def mix_colours(colour: str, ground: str, share: float) -> str:
    """The colour mixed into the ground with this share, 0 to 1; colours are written "#rrggbb"."""
    parts = [(int(colour[i : i + 2], 16), int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(ours * share + theirs * (1 - share)):02x}" for ours, theirs in parts)


_OWN = {
    f"own{number}": "fill:{0};stroke:{0}".format(mix_colours(colour, _DARK_GROUND, 0.42))
    for number, colour in enumerate(COLOURS.values())
}
_RULES = "".join(f".board-{name}{{{look}}}" for name, look in (_DARK | _OWN).items())
_STYLE = f"<style>@media screen and (prefers-color-scheme:dark){{{_RULES}}}</style>"


def _kind(order: str) -> str:
    words = order.split()
    if len(words) < 3:
        return ""
    return {"-": "arrow", "R": "arrow", "S": "line", "C": "line", "B": "build", "D": "cross"}.get(words[2], "ring")


def _legend(kinds: set[str], shows_certainty: bool, size: float, corner: Point, width: float) -> str:
    (left, top), high = corner, size * _LEGEND_HEIGHT
    middle, x = top + high / 2, left + size
    parts = [f'<rect class="board-legend" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{high:.1f}" fill="#ffffff"/>']
    for kind, text in _LEGEND.items():
        if kind in kinds:
            parts += _sample(kind, (x, middle), size)
            parts.append(_words(text, x + size * 2.7, middle, size))
            x += size * (3.5 + _LETTER * len(text))
    if shows_certainty:
        parts.append(_words("thicker: surer", x, middle, size))
    return f"<g>{''.join(parts)}</g>"


def _words(text: str, x: float, y: float, size: float) -> str:
    return (
        f'<text class="board-words" x="{x:.1f}" y="{y + size * 0.3:.1f}" font-size="{size * 0.85:.2f}" fill="{_INK}" '
        f'text-anchor="start">{text}</text>'
    )


def _sample(kind: str, start: Point, size: float) -> list[str]:
    (x, y), thick = start, size * 0.25
    tail, middle, end = (x - size * 0.8, y), (x + size * 1.2, y), (x + size * 2.2, y)
    if kind == "arrow":
        return _arrow(tail, end, _SAMPLE, thick, size)
    if kind == "line":
        return _line(tail, end, _SAMPLE, thick, size)
    if kind == "cross":
        return [_cross(middle, size * 0.55, thick)]
    return [_ring(middle, size * 0.65, _SAMPLE, thick, dashes=size * 0.35 if kind == "build" else 0.0)]


def _ring(middle: Point, radius: float, colour: str, thick: float, dashes: float = 0.0) -> str:
    look = f'fill="none" stroke="{colour}" stroke-width="{thick:.2f}"' + (f' stroke-dasharray="{dashes:.1f}"' if dashes else "")
    return f'<circle cx="{middle[0]:.1f}" cy="{middle[1]:.1f}" r="{radius:.2f}" {look}/>'


def _cross(middle: Point, reach: float, thick: float) -> str:
    ends = [(middle[0] + a * reach, middle[1] + b * reach) for a, b in ((-1, -1), (1, 1), (-1, 1), (1, -1))]
    return (
        f'<path d="M{_at(ends[0])}L{_at(ends[1])}M{_at(ends[2])}L{_at(ends[3])}" stroke="#b3261e" '
        f'stroke-width="{thick:.2f}" stroke-linecap="round"/>'
    )


def _meets(cell: Cell, frame: Frame) -> bool:
    x, y, width, height = frame
    across, down = [corner[0] for corner in cell.corners], [corner[1] for corner in cell.corners]
    return max(across) >= x and min(across) <= x + width and max(down) >= y and min(down) <= y + height


def _ground(board: Board, visible: list[Cell], size: float) -> list[str]:
    owners = {place: power for power, places in board.influence().items() for place in places}
    grounds: dict[tuple[str, str], list[str]] = {}
    for cell in visible:
        grounds.setdefault(_fill(cell, owners), []).append(_outline(cell.corners))
    lines = _lines(visible)
    drawn = [
        f'<path class="board-{kind}" d="{"".join(outlines)}" fill="{fill}" stroke="{fill}" stroke-width="{size * 0.05:.2f}"/>'
        for (kind, fill), outlines in grounds.items()
    ]
    for kind, (colour, width) in {"sea": ("#b9d0dd", 0.09), "land": ("#ffffff", 0.13), "coast": ("#6f93a8", 0.13)}.items():
        look = f'stroke="{colour}" stroke-width="{size * width:.2f}" stroke-linecap="round"'
        drawn += [f'<path class="board-{kind}-line" d="{lines[kind]}" {look}/>'] if lines[kind] else []
    return drawn


def _lines(visible: Iterable[Cell]) -> dict[str, str]:
    lines: dict[str, list[str]] = {"sea": [], "land": [], "coast": []}
    for cell in visible:
        for start, end, beyond in zip(cell.corners, (*cell.corners[1:], cell.corners[0]), cell.beyond, strict=True):
            if cell.name < beyond:  # each line once
                lines[("land", "coast", "sea")[cell.is_sea + (beyond in _SEAS)]].append(f"M{_at(start)}L{_at(end)}")
    return {kind: "".join(paths) for kind, paths in lines.items()}


def _fill(cell: Cell, owners: Mapping[str, str]) -> tuple[str, str]:
    if cell.name in CLOSED:
        return "closed", _CLOSED
    if cell.is_sea:
        return "sea", _SEA
    if cell.name not in owners:
        return "free", _FREE
    owner = owners[cell.name]
    return f"own{POWERS.index(owner)}", mix_colours(COLOURS[owner], "#ffffff", 0.36)


def _names(board: Board, visible: list[Cell], size: float, frame: Frame) -> list[str]:
    owners = {centre: power for power, centres in board.centres().items() for centre in centres}
    centres = {*owners, *board.free_centres()}
    left, top, width, height = frame
    drawn = []
    for name in dict.fromkeys(cell.name for cell in visible if cell.name not in CLOSED):
        x, y = place(name)
        if not (left < x < left + width and top < y < top + height):
            continue
        x, y = name_place(name, size)
        if name in centres:
            fill = COLOURS[owners[name]] if name in owners else "#ffffff"
            look = "board-ring" if name in owners else "board-ring board-none"
            drawn.append(
                f'<circle class="{look}" cx="{x - size * 1.0:.1f}" cy="{y:.1f}" r="{size * 0.27:.2f}" '
                f'fill="{fill}" stroke="{_INK}" stroke-width="{size * 0.1:.2f}"/>'
            )
            x += size * 0.2
        drawn.append(
            f'<text class="board-name" x="{x:.1f}" y="{y + size * 0.3:.1f}" font-size="{size * 0.82:.2f}" fill="{_INK}" '
            f'paint-order="stroke" stroke="#ffffff" stroke-opacity="0.75" stroke-width="{size * 0.22:.2f}">{name}</text>'
        )
    return drawn


def _units(board: Board, size: float) -> list[str]:
    drawn = []
    for power in POWERS:
        for unit in board.units()[power]:
            drawn += _unit(unit, place(unit[2:]), COLOURS[power], size)
        for unit in board.dislodged()[power]:
            x, y = place(unit[2:])
            drawn += _unit(unit, (x + size, y - size), COLOURS[power], size * 0.8)
    return drawn


def _unit(unit: str, at: Point, colour: str, size: float) -> list[str]:
    x, y = at
    look = f'class="board-edge" fill="{colour}" stroke="#ffffff" stroke-width="{size * 0.14:.2f}"'
    if unit[0] == "A":
        shape = f'<circle cx="{x}" cy="{y}" r="{size * 0.72:.2f}" {look}/>'
    else:
        wide, high = size * 1.02, size * 0.66
        hull = [(x - wide, y - high), (x + wide, y - high), (x + wide * 0.6, y + high), (x - wide * 0.6, y + high)]
        shape = f'<path d="{_outline(hull)}" {look} stroke-linejoin="round"/>'
    return [
        shape,
        f'<text x="{x}" y="{y + size * 0.32:.1f}" font-size="{size * 0.9:.2f}" font-weight="700" fill="#ffffff">{unit[0]}</text>',
    ]


def _order(order: str, colour: str, certainty: float, size: float) -> list[str]:
    words = order.split()
    if len(words) < 3:
        return []  # a build that is waived
    here, thick = place(words[1]), size * (0.14 + 0.36 * certainty)
    if words[2] in ("-", "R"):
        return _arrow(here, place(words[3]), colour, thick, size)
    if words[2] in ("S", "C"):
        start, end = place(words[4]), place(words[6] if "-" in words else words[4])
        return _line(here, ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), colour, thick, size)
    if words[2] == "B":
        return [*_unit(order, here, colour, size), _ring(here, size * 1.15, colour, thick, dashes=size * 0.35)]
    if words[2] == "D":
        return [_cross(here, size * 0.95, max(thick, size * 0.25))]
    return [_ring(here, size * 1.15, colour, thick)]


def _arrow(start: Point, end: Point, colour: str, thick: float, size: float) -> list[str]:
    dx, dy, length = _direction(start, end)
    head = size * 0.55 + thick * 1.2
    tail = (start[0] + dx * size * 0.8, start[1] + dy * size * 0.8)
    tip = (end[0] - dx * min(size * 0.35, length * 0.1), end[1] - dy * min(size * 0.35, length * 0.1))
    neck = (tip[0] - dx * head, tip[1] - dy * head)
    wing = head * 0.62
    point = [tip, (neck[0] - dy * wing, neck[1] + dx * wing), (neck[0] + dy * wing, neck[1] - dx * wing)]
    shaft = f"M{_at(tail)}L{_at(neck)}"
    edge = size * 0.22
    return [
        f'<path class="board-edge" d="{shaft}" stroke="#ffffff" stroke-width="{thick + edge:.2f}"/>',
        f'<path class="board-tip" d="{_outline(point)}" fill="#ffffff" stroke="#ffffff" stroke-width="{edge:.2f}" '
        'stroke-linejoin="round"/>',
        f'<path d="{shaft}" stroke="{colour}" stroke-width="{thick:.2f}"/>',
        f'<path d="{_outline(point)}" fill="{colour}"/>',
    ]


def _line(start: Point, end: Point, colour: str, thick: float, size: float) -> list[str]:
    dx, dy, _ = _direction(start, end)
    tail = (start[0] + dx * size * 0.8, start[1] + dy * size * 0.8)
    path = f"M{_at(tail)}L{_at(end)}"
    return [
        f'<path class="board-edge" d="{path}" stroke="#ffffff" stroke-width="{thick + size * 0.2:.2f}"/>',
        f'<path d="{path}" stroke="{colour}" stroke-width="{thick:.2f}" stroke-dasharray="{size * 0.45:.1f} {size * 0.3:.1f}"/>',
        f'<circle class="board-edge" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="{size * 0.25 + thick * 0.6:.2f}" fill="{colour}" '
        f'stroke="#ffffff" stroke-width="{size * 0.1:.2f}"/>',
    ]


def _direction(start: Point, end: Point) -> tuple[float, float, float]:
    length = math.dist(start, end) or 1.0
    return (end[0] - start[0]) / length, (end[1] - start[1]) / length, length


def _outline(corners: Sequence[Point]) -> str:
    return "M" + "L".join(_at(corner) for corner in corners) + "Z"


def _at(point: Point) -> str:
    return f"{point[0]:.1f} {point[1]:.1f}"
