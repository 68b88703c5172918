"""Pictures of boards: the sketch has the game's adjacencies, and marks of orders are in the right place."""

import math
import random
import re
from xml.etree import ElementTree

import pytest
from diplomacy import Map

from entente.game.board import Board
from entente.game.geography import geography
from entente.game.positions import board_of
from entente.game.render import UNITS_ACROSS, draw_board, frame_around, order_locations
from entente.game.rules import MAP
from entente.game.scripted import player
from entente.game.sketch_map import CLOSED, COASTS, HEIGHT, LAND, SEA, WIDTH, cells, place

SVG = "{http://www.w3.org/2000/svg}"


def shapes(svg: str) -> list[ElementTree.Element]:
    """The top-level elements of a picture; fails if it is not XML."""
    return list(ElementTree.fromstring(svg))


def added(orders: dict[str, list[str]], board: Board, **how: dict[str, float]) -> list[ElementTree.Element]:
    """The elements that a picture with orders adds to the one without."""
    plain = {ElementTree.tostring(shape) for shape in shapes(draw_board(board))}
    return [shape for shape in shapes(draw_board(board, orders, **how)) if ElementTree.tostring(shape) not in plain]


def test_two_provinces_touch_on_the_sketch_exactly_where_they_are_neighbours_in_the_game():
    theirs = Map(MAP)
    neighbours = {frozenset((one.upper()[:3], other.upper()[:3])) for one, others in theirs.loc_abut.items() for other in others}
    touching = {frozenset((cell.name, beyond)) for cell in cells() for beyond in cell.beyond if beyond}
    closed = set(CLOSED)
    assert {pair for pair in touching if len(pair) == 2 and not pair & closed} == {
        pair for pair in neighbours if len(pair) == 2 and not pair & closed
    }


def test_every_place_of_the_game_lies_on_the_sketch_and_on_its_own_province():
    grounds = {cell.corners: cell.name for cell in cells()}
    locations = [location.upper() for location in Map(MAP).locs]
    assert len(locations) > 75
    for location in locations:
        if location[:3] in CLOSED:
            continue
        here = place(location)
        assert 0 < here[0] < WIDTH and 0 < here[1] < HEIGHT
        (ground,) = [owner for corners, owner in grounds.items() if contains(corners, here)]
        assert ground == location[:3], location
    assert not set(LAND) & set(SEA)


def contains(corners: tuple[tuple[float, float], ...], point: tuple[float, float]) -> bool:
    """Whether a convex polygon contains the point: the point is on the same side of every edge."""
    turns = [
        (b[0] - a[0]) * (point[1] - a[1]) - (b[1] - a[1]) * (point[0] - a[0])
        for a, b in zip(corners, (*corners[1:], corners[0]), strict=True)
    ]
    return all(turn >= -1e-6 for turn in turns) or all(turn <= 1e-6 for turn in turns)


def test_a_picture_holds_nothing_that_another_on_the_same_page_could_meet():
    board = Board.start()
    svg = draw_board(board, {"FRANCE": ["A PAR - BUR"]})
    names = {name for shape in ElementTree.fromstring(svg).iter() for name in shape.attrib}
    tags = {shape.tag.removeprefix(SVG) for shape in ElementTree.fromstring(svg).iter()}
    classes = {name for shape in ElementTree.fromstring(svg).iter() for name in shape.get("class", "").split()}
    assert not names & {"id", "style", "href"} and tags == {"svg", "style", "g", "rect", "path", "circle", "text"}
    assert classes and all(name.startswith("board-") for name in classes)
    assert "url(" not in svg and len(svg) < 100_000


def test_every_unit_stands_once_in_its_power_s_colour():
    board = Board.start()
    letters = [shape for shape in shapes(draw_board(board)) if shape.tag == f"{SVG}text" and shape.text in ("A", "F")]
    at = {(float(shape.attrib["x"]), shape.text) for shape in letters}
    assert at == {(place(unit[2:])[0], unit[0]) for units in board.units().values() for unit in units}
    assert len(letters) == 22


def test_no_unit_at_any_place_hides_the_name_or_ring_of_a_province():
    """A name's box has three letters and a ring; units are fleets where fleets may go."""
    svg, size = draw_board(Board.start()), WIDTH / UNITS_ACROSS
    fleets = {location[:3] for kind, location in geography().reach if kind == "F"}
    names = [shape for shape in ElementTree.fromstring(svg).iter(f"{SVG}text") if shape.get("class") == "board-name"]
    assert len(names) == len(LAND | SEA)
    rings = [shape for shape in ElementTree.fromstring(svg).iter(f"{SVG}circle") if "board-ring" in shape.get("class", "")]
    middles = [(float(shape.attrib["x"]), float(shape.attrib["y"]) - 0.3 * size, 0.85, 0.35) for shape in names]
    middles += [(float(shape.attrib["cx"]), float(shape.attrib["cy"]), 0.3, 0.3) for shape in rings]
    for location in (*LAND, *SEA, *COASTS):
        x, y = place(location)
        wide, high = (1.02, 0.66) if location[:3] in fleets else (0.72, 0.72)
        for across, down, half, tall in middles:
            apart = abs(across - x) > (wide + half) * size * 0.98 or abs(down - y) > (high + tall) * size * 0.98
            assert apart, (location, across, down)


@pytest.mark.parametrize(
    ("order", "ends"),
    [
        pytest.param("A PAR - BUR", ["PAR", "BUR"], id="move"),
        pytest.param("A MAR S A PAR", ["MAR", "PAR"], id="support to hold"),
        pytest.param("A MAR H", ["MAR"], id="hold"),
        pytest.param("F STP/SC - BOT", ["STP/SC", "BOT"], id="move from a coast"),
    ],
)
def test_the_mark_of_an_order_begins_and_ends_where_the_order_does(order: str, ends: list[str]):
    marks = added({"FRANCE": [order]}, Board.start())
    assert marks
    numbers = re.findall(r"-?\d+\.?\d*", " ".join(m.get("d", "") for m in marks))
    points = list(zip(map(float, numbers[::2]), map(float, numbers[1::2]), strict=True))
    points += [(float(mark.attrib["cx"]), float(mark.attrib["cy"])) for mark in marks if "cx" in mark.attrib]
    for end in ends:
        assert min(math.dist(point, place(end)) for point in points) < 40
    assert all(
        min(math.dist(point, place(end)) for end in ends) < math.dist(place(ends[0]), place(ends[-1])) + 40 for point in points
    )


def test_a_support_of_a_move_points_between_its_ends_and_a_waived_build_leaves_no_mark():
    marks = added({"FRANCE": ["A MAR S A PAR - BUR"]}, Board.start())
    (dot,) = [mark for mark in marks if mark.tag == f"{SVG}circle"]
    halfway = [(a + b) / 2 for a, b in zip(place("PAR"), place("BUR"), strict=True)]
    assert [float(dot.attrib["cx"]), float(dot.attrib["cy"])] == pytest.approx(halfway, abs=0.1)
    assert added({"FRANCE": ["WAIVE"]}, Board.start()) == []


def test_builds_that_a_power_without_units_waives_are_drawn_around_its_centres():
    board = board_of("W1905A", {}, {}, {"FRANCE": ["PAR", "BRE"]})
    assert order_locations(board, "FRANCE", ["WAIVE", "WAIVE"]) == {"PAR", "BRE"}


def test_a_frame_shows_every_place_that_the_orders_name_and_stays_on_the_sketch(positions):
    boards, rng = [Board.restore(snapshot) for snapshot in positions], random.Random(0)
    for board, power, legal in [(b, *each) for b in boards for each in b.legal_orders().items()]:
        places = order_locations(board, power, player("random")(legal, rng))
        x, y, width, height = frame_around(places)
        assert x >= 0 and y >= 0 and x + width <= WIDTH + 1e-6 and y + height <= HEIGHT + 1e-6
        for location in places:
            across, down = place(location)
            assert x < across < x + width and y < down < y + height
        assert width / height == pytest.approx(4 / 3)
