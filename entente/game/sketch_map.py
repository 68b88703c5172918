"""A sketch map drawn for this project: one or more points per province, and the cells around them.

Points are rough longitudes and latitudes, moved a little in crowded areas. The ground of a province is the area nearer to its
points than to those of any other province. Two provinces touch on the sketch exactly if they are adjacent in the game (tested).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

Point = tuple[float, float]

LAND: dict[str, tuple[Point, ...]] = {
    "CLY": ((-4.6, 58.0), (-5.0, 57.0)), "EDI": ((-3.0, 56.5), (-2.4, 55.7), (-2.6, 57.3)), "LVP": ((-2.9, 54.3), (-4.0, 55.2)),
    "YOR": ((-0.2, 53.2), (-1.0, 54.1)), "WAL": ((-3.9, 52.3), (-4.6, 50.5), (-3.3, 50.9)),
    "LON": ((-0.3, 51.7), (1.0, 52.4), (-1.6, 51.1), (0.9, 51.2)),
    "NWY": ((8.3, 61.2), (7.0, 59.2), (10.4, 60.0), (11.5, 63.8), (14.0, 66.5), (18.0, 68.9), (23.5, 69.9), (28.6, 69.7)),
    "SWE": ((15.2, 60.4), (14.2, 57.4), (13.6, 56.0), (12.8, 58.7), (15.4, 62.8), (17.8, 64.8), (20.0, 66.8), (16.4, 58.6)),
    "FIN": ((26.4, 62.5), (23.6, 61.2), (25.8, 64.9), (25.6, 67.4), (23.4, 63.1), (28.6, 61.6)),
    "STP": ((35.5, 61.0), (31.0, 59.3), (32.0, 62.6), (33.5, 67.0), (31.5, 65.0), (40.0, 59.5), (41.5, 63.0), (38.5, 63.5),
        (47.0, 61.0), (46.0, 65.5)), "DEN": ((9.3, 56.2), (9.3, 55.2), (11.9, 55.5)),
    "BRE": ((-2.8, 48.2), (-1.0, 48.4), (-1.2, 47.4)), "PIC": ((0.4, 49.2), (1.9, 49.9), (3.2, 49.6)),
    "PAR": ((1.9, 48.1), (1.6, 47.2)), "BUR": ((5.0, 47.3), (5.6, 48.9), (3.6, 46.2)),
    "GAS": ((-0.5, 44.6), (1.2, 45.2), (0.2, 43.6)), "MAR": ((4.5, 44.3), (5.6, 45.1), (2.6, 43.5), (6.3, 44.0)),
    "SPA": ((-4.0, 40.2), (-4.6, 42.6), (-0.8, 41.3), (-7.6, 42.7), (-5.2, 37.6), (-2.3, 38.3), (1.5, 41.8)),
    "POR": ((-8.3, 39.6), (-8.1, 41.0), (-8.2, 38.2)), "BEL": ((4.4, 50.5), (3.2, 50.9)), "HOL": ((5.5, 52.4), (6.3, 53.0)),
    "RUH": ((7.8, 51.1),), "KIE": ((10.0, 53.0), (9.6, 54.2), (8.2, 52.9)), "BER": ((13.5, 52.5), (13.2, 53.6), (15.2, 53.4)),
    "MUN": ((11.0, 49.2), (11.6, 50.6), (9.2, 49.0)), "PRU": ((19.6, 53.5), (17.0, 53.9), (21.7, 54.6)),
    "SIL": ((16.6, 51.3), (14.6, 51.2), (17.9, 50.3)), "BOH": ((14.6, 49.7), (16.9, 49.1)),
    "TYR": ((11.7, 47.1), (13.8, 47.0), (10.0, 46.4)), "VIE": ((16.0, 47.9), (17.6, 48.3)),
    "TRI": ((16.3, 45.3), (14.4, 45.7), (17.8, 43.9), (19.2, 42.5)),
    "BUD": ((20.4, 47.0), (24.0, 46.6), (22.4, 47.7), (18.6, 46.9)), "GAL": ((23.4, 49.4), (20.2, 49.8)),
    "WAR": ((21.2, 51.9), (23.4, 52.2), (19.2, 51.4)), "LVN": ((24.8, 56.4), (26.2, 58.3), (23.4, 55.0), (21.8, 56.6)),
    "MOS": ((37.0, 55.4), (31.0, 55.4), (33.0, 57.4), (42.0, 53.5), (46.0, 57.0), (29.0, 57.0)),
    "UKR": ((29.8, 50.3), (28.2, 48.7), (33.4, 50.2), (26.4, 50.6)),
    "SEV": ((37.5, 48.3), (30.8, 47.0), (34.0, 47.2), (34.3, 45.5), (40.5, 46.0), (43.5, 44.2), (46.0, 49.0)),
    "PIE": ((7.9, 44.9), (9.2, 45.0)), "VEN": ((11.8, 45.3), (13.2, 46.1), (12.7, 43.8)), "TUS": ((10.9, 43.5), (10.1, 44.2)),
    "ROM": ((12.5, 42.2),), "APU": ((15.6, 41.4), (14.2, 42.3), (17.0, 40.7)),
    "NAP": ((16.5, 39.0), (15.3, 40.2), (13.9, 41.2), (14.8, 37.7), (13.3, 37.6)),
    "SER": ((21.0, 43.8), (21.4, 44.4), (21.4, 42.1)), "ALB": ((20.0, 41.0), (19.9, 40.2)),
    "GRE": ((22.0, 39.4), (22.2, 37.5), (23.4, 40.6), (23.6, 38.3)),
    "BUL": ((25.0, 42.8), (23.5, 43.1), (27.0, 42.6), (24.6, 41.5)),
    "RUM": ((26.2, 44.9), (23.8, 44.7), (28.3, 44.7), (27.2, 46.9)), "CON": ((28.9, 40.6), (26.9, 40.9)),
    "ANK": ((33.3, 40.6), (36.2, 40.4)), "SMY": ((30.0, 38.3), (27.9, 38.2), (33.0, 37.6), (36.0, 38.2)),
    "ARM": ((41.0, 40.2), (42.0, 41.9), (45.0, 40.0), (39.4, 39.0)), "SYR": ((38.2, 36.4), (37.0, 34.0), (41.0, 35.5)),
    "NAF": ((-1.0, 34.5), (-5.6, 34.6), (3.6, 35.8)), "TUN": ((9.2, 35.6), (9.6, 36.7)),
}  # fmt: skip
"""Provinces that armies may enter -> degrees east and north; the unit is drawn at the first point."""
SEA: dict[str, tuple[Point, ...]] = {
    "NAO": ((-14.0, 57.0), (-8.6, 58.4), (-12.5, 53.2), (-20.0, 52.5), (-8.0, 55.9), (-6.3, 55.4)),
    "NWG": ((-1.0, 64.5), (5.0, 65.8), (-8.0, 62.5), (3.0, 62.8), (8.5, 68.0), (14.0, 70.6), (-3.6, 59.6), (-16.0, 64.5)),
    "BAR": ((36.0, 70.6), (42.0, 68.6), (28.0, 72.2), (21.0, 71.9), (48.0, 70.0), (38.8, 66.2)),
    "NTH": ((3.3, 56.4), (2.7, 53.2), (2.2, 51.9), (1.2, 54.6), (0.2, 57.6), (5.0, 57.5), (2.0, 60.0), (5.2, 54.9)),
    "SKA": ((10.4, 57.9), (11.7, 57.0)), "HEL": ((7.4, 54.4), (7.2, 53.9)),
    "BAL": ((18.2, 56.2), (19.3, 58.0), (15.6, 55.0), (12.8, 54.6), (11.0, 54.5), (20.0, 55.3)),
    "BOT": ((19.6, 61.6), (21.6, 64.4), (20.0, 59.9), (23.6, 59.6), (27.2, 59.9)),
    "IRI": ((-8.0, 50.6), (-5.3, 53.2), (-5.9, 51.6), (-5.0, 54.0)),
    "ENG": ((-5.3, 49.2), (-2.6, 49.7), (0.3, 50.3), (1.6, 50.8)),
    "MAO": ((-12.5, 45.0), (-5.8, 46.6), (-3.4, 45.0), (-12.0, 40.0), (-10.5, 36.6), (-7.6, 36.1), (-14.0, 49.0), (-8.4, 48.3),
        (-6.5, 44.6)), "WES": ((3.0, 38.9), (-1.8, 36.5), (-4.0, 36.0), (6.0, 38.4), (0.8, 39.2), (8.0, 38.8)),
    "LYO": ((6.2, 42.2), (3.9, 42.3), (8.6, 43.6), (4.6, 41.0), (8.6, 41.9)),
    "TYS": ((11.4, 40.2), (10.6, 41.8), (13.2, 39.4), (10.2, 38.6), (12.6, 38.9)),
    "ION": ((18.2, 36.8), (16.6, 36.6), (14.0, 35.8), (12.0, 36.3), (18.2, 38.8), (20.2, 37.4), (17.8, 39.4), (21.2, 36.0)),
    "ADR": ((15.5, 43.3), (13.6, 44.6), (17.1, 42.3), (18.6, 41.2), (18.9, 40.3)),
    "AEG": ((25.3, 38.4), (24.2, 37.0), (23.2, 36.0), (25.3, 40.0), (26.4, 36.6)),
    "EAS": ((30.5, 34.6), (33.2, 35.2), (26.0, 34.6), (34.6, 33.4)),
    "BLA": ((34.0, 43.3), (30.3, 43.3), (38.6, 42.9), (31.0, 45.3)),
}  # fmt: skip
"""Sea provinces -> degrees east and north; the fleet is drawn at the first point."""
CLOSED: dict[str, tuple[Point, ...]] = {
    "SWI": ((8.0, 46.8), (7.0, 46.2)),
    "EIRE": ((-8.0, 52.4), (-8.2, 53.8), (-7.0, 54.6), (-6.9, 52.8)),
}
COASTS: dict[str, Point] = {
    "STP/NC": (35.5, 64.4), "STP/SC": (30.9, 60.1), "SPA/NC": (-5.2, 42.3), "SPA/SC": (-1.9, 38.5), "BUL/EC": (26.5, 43.1),
    "BUL/SC": (24.7, 41.5),
}  # fmt: skip
"""Where a fleet on one of two coasts is drawn, in degrees."""

NAME_BELOW: Point = (0.0, 1.24)
"""Where the middle of a province's abbreviation lies: right of and below the place of its unit, in half widths of a unit."""
NAMES_BESIDE: dict[str, Point] = {
    "CLY": (-0.51, -1.24), "LVP": (-2.29, 0.0), "YOR": (0.51, -1.24), "LON": (-1.72, 1.24), "STP": (0.0, -1.24),
    "DEN": (1.15, 1.24), "PIC": (0.51, -1.24), "BUR": (0.43, -1.24), "SPA": (0.0, -1.24), "HOL": (-0.72, -1.55),
    "KIE": (0.72, -1.55), "BER": (0.0, -1.24), "MUN": (0.5, -1.24), "PRU": (0.51, -1.24), "SIL": (0.86, 1.24),
    "BOH": (1.72, 0.31), "TYR": (-1.72, 0.0), "TRI": (1.72, 1.24), "GAL": (-1.72, 0.0), "VEN": (1.9, 1.12),
    "TUS": (-1.01, 1.24), "ROM": (-2.29, 0.62), "APU": (0.51, 1.24), "NAP": (-0.57, 1.24), "SER": (0.0, -1.24),
    "ALB": (-0.25, 1.24), "BUL": (-1.15, -1.24), "RUM": (0.57, -1.24), "CON": (0.57, -1.24), "SKA": (1.52, 1.24),
    "HEL": (-2.02, -0.31), "BAL": (0.0, -1.24), "IRI": (-0.51, 1.24), "ENG": (-0.51, 1.24), "ADR": (2.02, 0.93),
}  # fmt: skip
"""The same for provinces where a unit next to it would hide the abbreviation (tested)."""

WIDTH, HEIGHT = 1000.0, 800.0
"""Size of the whole sketch, in SVG units."""
_MIDDLE, _SCALE = (13.5, 52.2), 1120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A convex part of a province's ground: the area nearest to one of its points."""

    name: str
    corners: tuple[Point, ...]
    """Corners in order around the cell, in SVG units."""
    beyond: tuple[str, ...]
    """Per side, from its corner to the next: the province on the other side (possibly the same), or '' at the sketch's edge."""

    @property
    def is_sea(self) -> bool:
        return self.name in SEA


def place(location: str) -> Point:
    """SVG coordinates of a unit at `location`, such as "PAR" or "STP/SC"; a KeyError for an unknown location."""
    return _drawn(COASTS[location] if location in COASTS else (LAND | SEA)[location[:3]][0])


def name_place(name: str, size: float) -> Point:
    (x, y), (right, down) = place(name), NAMES_BESIDE.get(name, NAME_BELOW)
    return x + size * right, y + size * down


@lru_cache(maxsize=1)
def cells() -> tuple[Cell, ...]:
    points = [(name, _drawn(degrees)) for name, places in (LAND | SEA | CLOSED).items() for degrees in places]
    polygons = []
    for name, here in points:
        sides: list[tuple[Point, str]] = [((0.0, 0.0), ""), ((WIDTH, 0.0), ""), ((WIDTH, HEIGHT), ""), ((0.0, HEIGHT), "")]
        for other, there in sorted(points, key=lambda point: math.dist(here, point[1])):
            if math.dist(here, there) > 2 * max((math.dist(here, corner) for corner, _ in sides), default=0.0):
                break  # neither this point nor a farther one can cut the rest
            if there != here:
                sides = _nearer(sides, here, there, other)
        polygons.append(Cell(name=name, corners=tuple(corner for corner, _ in sides), beyond=tuple(side for _, side in sides)))
    return tuple(cell for cell in polygons if cell.corners)


def _drawn(degrees: Point) -> Point:
    """Equidistant conic projection around the middle of Europe, y downwards."""
    east, north = (math.radians(value) for value in degrees)
    middle_east, middle_north = (math.radians(value) for value in _MIDDLE)
    from_pole = 1 / math.tan(middle_north) + middle_north - north
    angle = (east - middle_east) * math.sin(middle_north)
    x = from_pole * math.sin(angle)
    y = from_pole * math.cos(angle) - 1 / math.tan(middle_north)
    return round(WIDTH / 2 + _SCALE * x, 1), round(HEIGHT / 2 + _SCALE * y, 1)


def _nearer(sides: list[tuple[Point, str]], here: Point, there: Point, other: str) -> list[tuple[Point, str]]:
    """The part of a polygon that is nearer to `here` than to `there`; the side that this cuts is labelled `other`."""
    (ax, ay), (bx, by) = here, there
    normal, limit = (bx - ax, by - ay), (bx * bx + by * by - ax * ax - ay * ay) / 2
    excess = [corner[0] * normal[0] + corner[1] * normal[1] - limit for corner, _ in sides]
    kept: list[tuple[Point, str]] = []
    for index, (corner, side) in enumerate(sides):
        following = (index + 1) % len(sides)
        if excess[index] <= 0:
            kept.append((corner, side))
        if (excess[index] <= 0) != (excess[following] <= 0):
            share = excess[index] / (excess[index] - excess[following])
            end = sides[following][0]
            cut = (corner[0] + share * (end[0] - corner[0]), corner[1] + share * (end[1] - corner[1]))
            kept.append((cut, other if excess[index] <= 0 else side))
    return kept
