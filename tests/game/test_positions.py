"""Positions that others wrote: every phase of real games is read back to its legal orders; what is impossible is refused."""

import contextlib
import copy
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from entente.game.board import POWERS, Board
from entente.game.geography import geography
from entente.game.legal import OrderKind
from entente.game.positions import board_of, board_of_state, contested_in
from entente.game.prompts import OwnLine, PromptSettings, board_text, power_text, rules_text
from entente.game.read_prompt import read_prompt
from entente.game.recorded import as_recorded, board_of_game
from entente.game.scripted import player
from entente.telemetry.errors import InputError
from tests.game.package_games import package_game, saved_form


def games(count: int, last_year: int, name: str = "random", first: int = 0) -> Iterator[tuple[list[Board], dict[str, Any]]]:
    """The boards of games, and each game as the diplomacy package saves it."""
    for seed in range(first, first + count):
        rng, board, boards, turns = random.Random(seed), Board.start(), [], []
        while not board.is_over and board.year <= last_year:
            orders = {power: player(name)(legal, rng, board) for power, legal in board.legal_orders().items()}
            boards.append(board.fork())
            turns.append((boards[-1], orders))
            board.step(orders)
        yield boards, json.loads(as_recorded(f"game-{seed}", turns, board))


@pytest.fixture(scope="module")
def played() -> list[tuple[list[Board], dict[str, Any]]]:
    return list(games(3, 1903, "mover", first=2))


def test_a_state_of_the_package_has_the_legal_orders_of_its_game_in_every_phase(played):
    kinds = set()
    for boards, saved in played:
        for number, board in enumerate(boards):
            read = board_of_state(saved["phases"][number]["state"])
            assert read.phase == board.phase and read.legal_orders() == board.legal_orders()
            assert (read.units(), read.centres(), read.dislodged()) == (board.units(), board.centres(), board.dislodged())
            until_here = {**saved, "phases": saved["phases"][: number + 1]}
            assert board_of_game(until_here).legal_orders() == board.legal_orders()
            assert board_of_game(until_here).last_orders == board.last_orders
            kinds |= {legal.kind for legal in board.legal_orders().values()}
    assert kinds == set(OrderKind)


FORMS = [
    PromptSettings(own_line=own_line, legal_orders=legal_orders, last_orders=last_orders)
    for own_line, legal_orders, last_orders in itertools.product(get_args(OwnLine), ("none", "lines"), (False, True))
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.own_line}-{form.legal_orders}-{form.last_orders}")
def test_a_prompt_is_read_back_to_its_power_and_its_legal_orders(played, form: PromptSettings):
    rng = random.Random(0)
    asked = [(board, legal) for boards, _ in played for board in boards for legal in board.legal_orders().values()]
    for kind in OrderKind:
        of_kind = [each for each in asked if each[1].kind is kind]
        for board, legal in rng.sample(of_kind, min(12, len(of_kind))):
            text = rules_text(form) + board_text(board, legal.power, form) + power_text(legal, board, form)
            power, read = read_prompt(text)
            assert (power, read.phase) == (legal.power, board.phase), text
            assert read.legal_orders()[power] == legal, text
            assert read.units() == board.units() and read.centres() == board.centres(), text
            assert read.last_orders == (board.last_orders if form.last_orders else {}), text


def test_a_board_and_the_name_of_a_power_are_enough():
    board = Board.start()
    shown = board_text(board, "", PromptSettings(own_line="in_place"))
    power, read = read_prompt(f"Here is the board.\n\n{shown}\nTURKEY\n")
    assert power == "TURKEY" and read.legal_orders() == board.legal_orders()


def test_a_saved_game_has_our_positions_where_the_package_judges_otherwise():
    """As after a dislodgement by convoy, or where its rules of disbands are older."""
    spring = Board.start()
    autumn = board_of("F1901M", {"FRANCE": ["A BUR"], "TURKEY": ["F BUL/SC"]}, {}, {"FRANCE": ["PAR"]})
    retreats = board_of("F1901R", {"ITALY": ["A BUR"]}, {"FRANCE": {"A BUR": ["PAR"]}}, {"FRANCE": ["PAR"]})
    turns = [(spring, {}), (autumn, {"FRANCE": ["A BUR - PAR"]})]
    saved = json.loads(as_recorded("otherwise", turns, retreats))
    assert [phase["name"] for phase in saved["phases"]] == ["S1901M", "F1901M", "F1901R"]
    assert saved["phases"][1]["orders"]["FRANCE"] == ["A BUR - PAR"]
    for board, phase in zip((spring, autumn, retreats), saved["phases"], strict=True):
        read = board_of_state(phase["state"])
        assert (read.units(), read.centres(), read.dislodged()) == (board.units(), board.centres(), board.dislodged())


def test_a_saved_game_ends_as_ours_did_where_the_package_would_play_on():
    """To it, a fleet that its own power's support would dislodge does not convoy, so France lacks the eighteenth centre."""
    units = {
        "FRANCE": ["A LON", "F NTH", "F EDI", "A RUH", "A HOL", "A BUR", "A PIC", "F ENG"],
        "GERMANY": ["A BEL", "F HEL"],
    }
    french = sorted(geography().centres - {"BEL"})[:17]
    board = board_of("F1908M", units, {}, {"FRANCE": french, "GERMANY": ["BEL"]}).fork()
    support = ["F EDI S F HEL - NTH", "A RUH S A LON - BEL"]
    orders = {"FRANCE": ["A LON - BEL VIA", "F NTH C A LON - BEL", *support], "GERMANY": ["F HEL - NTH"]}
    turns = [(board.fork(), orders)]
    assert not any(board.step(orders).rejected.values()) and board.is_over
    last = json.loads(as_recorded("won", turns, board))["phases"][-1]
    assert last["name"] == "COMPLETED" and set(last["state"]["centers"]["FRANCE"]) == {*french, "BEL"}


@pytest.fixture
def start() -> dict[str, Any]:
    """The state of spring 1901."""
    return json.loads(as_recorded("start", [], Board.start()))["phases"][0]["state"]


def change(state: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    changed = copy.deepcopy(state)
    place = changed
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return changed


@pytest.mark.parametrize(
    ("path", "to", "said"),
    [
        (["name"], "X1901M", "there is no phase 'X1901M'"),
        (["name"], "COMPLETED", "the game is over"),
        (["map"], "ancmed", "on the map 'ancmed', and only 'standard'"),
        (["units", "FRANCE"], [["A PAR"]], "'units' of FRANCE in the state must be a list"),
        (["centers"], 7, "'centers' in the state must map powers to lists"),
        (["units", "NARNIA"], ["A PAR"], "names the power 'NARNIA'"),
        (["centers", "NARNIA"], ["PAR"], "names the power 'NARNIA'"),
        (["units", "FRANCE"], ["A MAO"], "FRANCE cannot have the unit 'A MAO'"),
        (["units", "FRANCE"], ["F SPA"], "FRANCE cannot have the unit 'F SPA'"),
        (["units", "FRANCE"], ["A MUN"], "two units are in MUN"),
        (["units", "FRANCE"], ["*A PAR"], "which is no phase of retreats"),
        (["centers", "FRANCE"], ["BUR"], "it is no supply centre"),
        (["centers", "FRANCE"], ["MUN"], "MUN is owned twice"),
        (["rules"], ["BUILD_ANY"], "has the rule BUILD_ANY, which is not played here"),
    ],
)
def test_an_impossible_state_is_refused_in_a_sentence(start, path: list[Any], to: Any, said: str):
    with pytest.raises(InputError) as refused:
        board_of_state(change(start, *path, to=to))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"retreats": None, "builds": "many", "fixed_state": 1, "map": None, "rules": None}, id="empty-and-unknown"),
        pytest.param({"units": {"NARNIA": [], "UNOWNED": None}, "centers": {"NARNIA": []}}, id="powers-without-anything"),
        pytest.param({"retreats": {"FRANCE": {"A PAR": ["BUR"]}}}, id="retreats-left-from-an-earlier-phase"),
        pytest.param({"units": {"FRANCE": ["a  par", "A MAR", "A MAR", "F BRE"]}}, id="small-letters-and-a-unit-twice"),
        pytest.param({"units": {"France": ["A PAR/NC", "A MAR", "F BRE"], "FRANCE": None}}, id="an-army-with-a-coast"),
        pytest.param({"centers": {"FRANCE": ["BRE", "MAR", "PAR", "PAR"]}}, id="a-centre-twice"),
    ],
)
def test_what_other_programs_write_beside_a_position_changes_nothing(start, changes: dict[str, Any]):
    for part, to in changes.items():
        start[part] = {**(start.get(part) or {}), **to} if isinstance(to, dict) else to
    read = board_of_state(start)
    assert read.legal_orders() == Board.start().legal_orders() and read.centres() == Board.start().centres()


def test_a_state_without_a_name_takes_that_of_its_phase(start):
    del start["name"]
    for state in (start, start | {"name": None}):
        assert board_of_game({"phases": [{"name": "S1901M", "state": state}]}).legal_orders() == Board.start().legal_orders()
    with pytest.raises(InputError, match="lacks the phase's name"):
        board_of_state(start)


@pytest.mark.parametrize(
    ("retreats", "places"),
    [
        pytest.param({"A BUR": ["GAS", "MOS", "MAR", "", "SPA/NC", "NOWHERE"]}, ("GAS",), id="out-of-reach-and-occupied"),
        pytest.param({"a bur": ["gas", "gas"]}, ("GAS",), id="small-letters-and-twice"),
        pytest.param({"A BUR": []}, (), id="none"),
        pytest.param({}, ("BEL", "GAS", "RUH"), id="not-named"),
        pytest.param({"A BUR": None}, ("BEL", "GAS", "RUH"), id="null"),
        pytest.param({"A BUR": ["GAS"], "A PAR": ["PIC"]}, ("GAS",), id="of-a-unit-that-was-not-dislodged"),
    ],
)
def test_a_dislodged_unit_may_go_where_the_state_and_the_map_let_it(start, retreats: dict[str, Any], places: tuple[str, ...]):
    start["name"] = "S1901R"
    start["units"]["FRANCE"].append("*A BUR")
    start["units"]["GERMANY"][-1] = "A BUR"
    start["units"]["ENGLAND"] = ["F PIC"]
    start["units"]["ITALY"][0] = "A MUN"
    start["retreats"]["FRANCE"] = retreats
    assert board_of_state(start).dislodged()["FRANCE"] == {"A BUR": places}


def test_two_dislodged_units_in_one_province_and_an_impossible_one_are_refused(start):
    for units in (["*F BUR"], ["*A BUR", "*A  bur/nc"], ["*A BUR"], ["*"]):
        state = change(change(start, "name", to="S1901R"), "units", "FRANCE", to=units)
        state["units"]["GERMANY"] = ["*A BUR"]
        with pytest.raises(InputError, match="dislodged unit"):
            board_of_state(state)


CONVOYED = {"ENGLAND": ["A LON", "F NTH", "A PIC"], "FRANCE": ["A BEL"], "GERMANY": ["A MUN"], "ITALY": ["A MAR"]}
ATTACK = ["A LON - BEL VIA", "F NTH C A LON - BEL", "A PIC S A LON - BEL"]


def test_retreats_that_the_package_lists_after_a_dislodgement_by_convoy_are_dropped():
    """It lists every neighbour there, also the occupied and the contested ones."""
    saved = saved_form(package_game(CONVOYED, {"ENGLAND": ATTACK, "GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR - BUR"]}))
    state = saved["phases"][-1]["state"]
    assert state["retreats"]["FRANCE"] == {"A BEL": ["BUR", "HOL", "PIC", "RUH"]}
    assert board_of_state(state).dislodged()["FRANCE"] == {"A BEL": ("BUR", "HOL", "RUH")}, "a state does not say who bounced"
    assert board_of_game(saved).dislodged()["FRANCE"] == {"A BEL": ("HOL", "RUH")}


@pytest.mark.parametrize(
    ("orders", "contested"),
    [
        ({"GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR - BUR"]}, {"BUR"}),
        ({"GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR S A MUN - BUR"]}, set()),
        ({"FRANCE": ["A BEL - PIC"], "ENGLAND": ["A PIC - BEL", "F NTH S A PIC - BEL"]}, set()),
        ({"FRANCE": ["A BEL - PIC"], "GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR H"]}, {"PIC"}),
    ],
    ids=["bounce", "moved", "by-the-unit-that-came-from-there", "occupied"],
)
def test_the_record_of_a_phase_says_where_units_bounced(orders: dict[str, list[str]], contested: set[str]):
    assert contested_in(saved_form(package_game(CONVOYED, orders))["phases"][0]) == contested


@pytest.mark.parametrize(
    "phase", [None, {}, {"orders": 3, "results": {}}, {"orders": {"FRANCE": [1, "A - B", None]}, "results": {}}]
)
def test_a_record_without_orders_or_results_says_nothing(phase: Any):
    assert contested_in(phase) == set()


@pytest.mark.parametrize("given", [None, {"phases": []}, {"phases": [{"state": []}]}, {"phases": [{"name": "S1901M"}]}])
def test_what_is_no_game_is_refused(given: Any):
    with pytest.raises(InputError):
        board_of_game(given)


BOARD = board_text(Board.start(), "", PromptSettings(own_line="in_place"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hello\nthere", "has no position"),
        (BOARD, "names no power to order for"),
        (BOARD + "NARNIA", "'NARNIA' is not part of a board"),
        (BOARD + "FRANCE\nGERMANY A MUN - BUR", "continues after FRANCE's line with 'GERMANY A MUN - BUR'"),
        (BOARD.replace("ITALY F NAP A ROM A VEN | NAP ROM VEN\n", "") + "FRANCE", "the board has no line of ITALY"),
        (BOARD.replace("A VEN |", "A BUD |") + "FRANCE", "two units are in BUD"),
        (BOARD + "LAST FRANCE A PAR - BUR; hello\nFRANCE", "'A PAR - BUR; hello' is no movement order"),
        (
            BOARD.replace("SPRING 1901 MOVEMENT", "SPRING 1901 RETREATS\nDISLODGED FRANCE A BUR") + "FRANCE",
            "name their retreats",
        ),
    ],
    ids=range(8),
)
def test_a_text_that_is_no_prompt_is_refused_in_a_sentence(text: str, said: str):
    with pytest.raises(InputError) as refused:
        read_prompt(text)
    assert said in str(refused.value)


def test_lines_cut_from_prompts_are_read_or_refused_and_never_fail_otherwise(played):
    rng = random.Random(7)
    boards = [board for boards, _ in played for board in boards if board.legal_orders()]
    read = 0
    for _ in range(300):
        board, form = rng.choice(boards), rng.choice(FORMS)
        legal = rng.choice(list(board.legal_orders().values()))
        words = (board_text(board, legal.power, form) + power_text(legal, board, form)).split(" ")
        for _ in range(rng.randint(1, 3)):
            words[rng.randrange(len(words))] = rng.choice([*POWERS, "|", "R", "A", "9", "A PAR", "FREE", "", "\n", "1 BUR"])
        with contextlib.suppress(InputError):
            read += bool(read_prompt(" ".join(words))[1].legal_orders())
    assert 20 < read < 300
