"""Draws the views of `entente sql` with their columns and join keys, as SVG: docs/pictures/views.svg."""

from collections.abc import Mapping, Sequence

_WIDTH, _LINE, _MOST = 178, 15, 9
_PLACES = {
    "snapshots": (0, 0), "phases": (0, 160), "groups": (0, 340), "group_eligibility": (0, 590),
    "decisions": (310, 170), "candidates": (310, 470),
    "orders": (620, 0), "tokens": (620, 80), "thoughts": (620, 250), "batches": (620, 390),
    "lag": (930, 0), "metrics": (930, 180),
}  # fmt: skip
"""View -> where its box is drawn."""
_JOINS = {
    ("decisions", "snapshots"): ("snapshot_id",),
    ("decisions", "phases"): ("shard", "start_group", "fork", "phase_index"),
    ("decisions", "groups"): ("shard", "start_group", "power", "phase"),
    ("groups", "group_eligibility"): ("shard", "start_group", "power", "phase"),
    ("decisions", "candidates"): ("shard", "start_group"),
    ("decisions", "orders"): ("decision_id",),
    ("decisions", "tokens"): ("decision_id",),
    ("decisions", "thoughts"): ("decision_id",),
    ("decisions", "batches"): ("decision_id",),
    ("batches", "lag"): ("step", "policy_lag"),
    ("batches", "metrics"): ("step",),
}
"""Two views -> the columns that join them."""


def views_picture(columns: Mapping[str, Sequence[str]]) -> str:
    """The picture of the views in `columns` (view -> its columns). Raises KeyError if a join names a column that a view lacks."""
    keys: dict[str, list[str]] = {view: [] for view in _PLACES}
    for pair, names in _JOINS.items():
        for view in pair:
            if missing := set(names) - set(columns[view]):
                raise KeyError(f"the view {view} has no column {', '.join(sorted(missing))}")
            keys[view] += [name for name in names if name not in keys[view]]
    lines = {view: _lines(columns[view], keys[view]) for view in _PLACES}
    parts = [_edge(one, other, names, lines) for (one, other), names in _JOINS.items()]
    parts += [_box(view, lines[view], keys[view]) for view in _PLACES]
    style = "text{font:12px sans-serif;fill:#222}.v{font-weight:bold;fill:#fff}.k{font-weight:bold}.j{fill:#666;font-size:11px}"
    size = 'width="1130" height="800"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="-10 -10 1130 800" role="img" aria-label="Views and join keys">'
    )
    return f'{head}<style>{style}</style><rect x="-10" y="-10" {size} fill="#fff"/>{"".join(parts)}</svg>\n'


def _lines(columns: Sequence[str], keys: Sequence[str]) -> list[str]:
    shown = [*keys, *(name for name in columns if name not in keys)]
    return shown if len(shown) <= _MOST + 1 else [*shown[:_MOST], f"and {len(shown) - _MOST} more"]


def _box(view: str, lines: Sequence[str], keys: Sequence[str]) -> str:
    x, y = _PLACES[view]
    bold = ' class="k"'
    rows = [
        f'<text x="{x + 8}" y="{y + 34 + _LINE * place}"{bold if name in keys else ""}>{name}</text>'
        for place, name in enumerate(lines)
    ]
    return (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_height(lines)}" rx="4" fill="#f6f8fa" stroke="#4a6572"/>'
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="20" rx="4" fill="#4a6572"/>'
        f'<text class="v" x="{x + 8}" y="{y + 14}">{view}</text>{"".join(rows)}'
    )


def _height(lines: Sequence[str]) -> int:
    return 26 + _LINE * len(lines)


def _edge(one: str, other: str, names: Sequence[str], lines: Mapping[str, Sequence[str]]) -> str:
    (ax, ay), (bx, by) = _PLACES[one], _PLACES[other]
    if ax == bx:  # one above the other
        start, end = (ax + _WIDTH / 2, ay + _height(lines[one])), (bx + _WIDTH / 2, by)
    else:
        low, high = max(ay, by), min(ay + _height(lines[one]), by + _height(lines[other]))
        same = (low + high) / 2  # a level line where both boxes have one
        start = (ax + _WIDTH if ax < bx else ax, same if low < high else ay + _height(lines[one]) / 2)
        end = (bx if ax < bx else bx + _WIDTH, same if low < high else by + _height(lines[other]) / 2)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 6 * len(names))
    words = "".join(
        f'<text class="j" text-anchor="middle" x="{middle[0]:g}" y="{middle[1] + 12 * place:g}">{name}</text>'
        for place, name in enumerate(names)
    )
    return f'<path d="M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1]:g}" stroke="#9aa7ad" fill="none"/>{words}'
