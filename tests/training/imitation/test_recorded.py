"""Recorded games are read as they were played, by whatever program; odd ones are skipped with a reason."""

import copy
import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diplomacy import Game

from entente.game.recorded import RefusedGameError, board_of_game, replay_recorded
from entente.telemetry.errors import EntenteError, InputError
from entente.training.imitation import recorded_files, teacher_games
from entente.training.imitation.positions import Positions
from entente.training.imitation.settings import ImitationSettings
from entente.training.imitation.teacher_games import make_games
from tests.game.package_games import package_game, saved_form
from tests.training.imitation.small import content, quiet


def record(seed: int, phases: int) -> dict[str, Any]:
    """A game of random orders in the untouched engine, as its package saves it. Some units get no order."""
    game, rng = Game(), random.Random(seed)
    for _ in range(phases):
        possible = game.get_all_possible_orders()
        for power in game.powers:
            places = game.get_orderable_locations(power)
            orders = [rng.choice(sorted(possible[place])) for place in places if possible[place]]
            if game.phase_type == "A":
                surplus = len(game.powers[power].centers) - len(game.powers[power].units)
                orders = orders[: abs(surplus)]
            game.set_orders(power, orders if game.phase_type == "A" else [each for each in orders if rng.random() < 0.9])
        game.process()
    return saved_form(game)


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    return record(3, 14)


def test_every_phase_of_a_recorded_game_is_met_with_its_orders(saved: dict[str, Any]):
    played, last_orders = 0, {}
    for phase, (board, orders) in zip(saved["phases"], replay_recorded(saved, "it"), strict=False):
        legal = board.legal_orders()
        assert board.last_orders == last_orders
        last_orders = orders if board.phase_type == "M" else last_orders
        assert board.phase == phase["name"]
        for power, own in orders.items():
            assert legal[power].admits(own)
            given = {order.rpartition("/")[0] if order.rpartition("/")[0] in own else order for order in phase["orders"][power]}
            assert given <= {*own} and all(order.split()[2] in ("H", "D") for order in {*own} - given - {"WAIVE"})
        played += 1
    assert played == len(saved["phases"]) - 1


def test_a_power_that_ordered_nothing_decided_nothing():
    game = Game()
    for orders in ({"FRANCE": ["A PAR - BUR"]}, {}, {"ITALY": ["A VEN H"]}):
        for power, own in orders.items():
            game.set_orders(power, own)
        game.process()
    first, second, third = list(replay_recorded(saved_form(game), "it"))
    assert first[1] == {"FRANCE": ("F BRE H", "A MAR H", "A PAR - BUR")}
    assert second[1] == {} and third[1] == {"ITALY": ("F NAP H", "A ROM H", "A VEN H")}
    assert second[0].last_orders["ITALY"] == ("F NAP H", "A ROM H", "A VEN H"), "a prompt shows what its units did"


def test_orders_of_the_phase_in_which_a_game_was_saved_are_not_played_yet():
    """Of a game in progress the package saves the orders so far: the power's other units were taught to hold."""
    game = Game()
    for own in (["A PAR - BUR"], ["A BUR - MUN"]):
        game.set_orders("FRANCE", own)
        saved = saved_form(game)
        game.process()
    assert saved["phases"][-1]["orders"]["FRANCE"] == ["A BUR - MUN"]
    assert [board.phase for board, _ in replay_recorded(saved, "it")] == ["S1901M"]


CONVOY = {"ENGLAND": ["A LON", "F NTH"], "FRANCE": ["F SPA/SC", "A PAR", "A MAR"]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("A LON - BEL", "A LON - BEL VIA"),
        ("A LON - NTH - BEL", "A LON - BEL VIA"),
        ("a lon - bel via", "A LON - BEL VIA"),
        ("Army London - Belgium", "A LON - BEL VIA"),
        ("A LON - WAL", "A LON - WAL"),
        ("LON H", "A LON H"),
        ("F NTH CONVOY A LON - BEL", "F NTH C A LON - BEL"),
        ("NTH C LON - BEL", "F NTH C A LON - BEL"),
        ("F SPA - GAS", None),
        ("F SPA - LYO", "F SPA/SC - LYO"),
        ("F SPA/NC - POR", "F SPA/SC - POR"),
        ("A PAR S MAR - BUR", "A PAR S A MAR - BUR"),
        ("A MAR S F SPA/SC H", "A MAR S F SPA/SC"),
        ("A MAR - SPA/NC", "A MAR - SPA"),
        ("A PAR -", None),
        ("A MUN H", None),
    ],
)
def test_an_order_is_read_as_the_packages_parser_reads_it(written: str, read: str | None):
    power = "ENGLAND" if "LON" in (read or "").upper() else "FRANCE"
    saved = saved_form(package_game(CONVOY, {}))
    saved["phases"][0]["orders"][power] = [written]
    if read is None:
        with pytest.raises(RefusedGameError, match="not legal there") as refused:
            list(replay_recorded(saved, "it"))
        assert refused.value.reason == "an order is not legal"
        ignored: list[str] = []
        ((_, orders),) = replay_recorded(saved, "it", ignored.append)
        assert len(ignored) == 1 and written in ignored[0] and all(order.endswith(" H") for order in orders[power])
    else:
        ((_, orders),) = replay_recorded(saved, "it")
        assert read in orders[power]


def test_a_retreat_that_the_package_let_happen_is_read_from_its_record():
    """After a dislodgement by convoy it lets a unit go where two others bounced."""
    units = {"ENGLAND": ["A LON", "F NTH", "A PIC"], "FRANCE": ["A BEL"], "GERMANY": ["A MUN"], "ITALY": ["A MAR"]}
    attack = ["A LON - BEL VIA", "F NTH C A LON - BEL", "A PIC S A LON - BEL"]
    game = package_game(units, {"ENGLAND": attack, "GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR - BUR"]})
    game.set_orders("FRANCE", ["A BEL R BUR"])
    game.process()
    saved = saved_form(game)
    (_, (retreats, orders)) = list(replay_recorded(saved, "it"))
    assert orders == {"FRANCE": ("A BEL R BUR",)}
    assert retreats.dislodged()["FRANCE"] == {"A BEL": ("BUR", "HOL", "RUH")}
    saved["phases"][1]["orders"]["FRANCE"] = ["VOID A BEL R PIC"]
    (_, (retreats, orders)) = list(replay_recorded(saved, "it"))
    assert orders == {"FRANCE": ("A BEL D",)} and retreats.dislodged()["FRANCE"] == {"A BEL": ("HOL", "RUH")}


@pytest.mark.parametrize(
    "moves", [("A MUN - BUR", "A MAR - BUR"), ("a mun - bur", "Army Marseilles - Burgundy"), ("MUN - BUR", "MAR - BUR")]
)
def test_retreats_that_a_state_lacks_are_those_of_the_rules_however_the_moves_are_written(moves: tuple[str, str]):
    units = {"ENGLAND": ["A HOL", "A PIC"], "FRANCE": ["A BEL"], "GERMANY": ["A MUN"], "ITALY": ["A MAR"]}
    attack = ["A HOL - BEL", "A PIC S A HOL - BEL"]
    game = package_game(units, {"ENGLAND": attack, "GERMANY": ["A MUN - BUR"], "ITALY": ["A MAR - BUR"]})
    game.set_orders("FRANCE", ["A BEL R RUH"])
    game.process()
    saved = saved_form(game)
    saved["phases"][0]["orders"] |= {"GERMANY": [moves[0]], "ITALY": [moves[1]]}
    del saved["phases"][1]["state"]["retreats"]  # other programs have none
    (_, (retreats, _)) = list(replay_recorded(saved, "it"))
    now = board_of_game(saved | {"phases": saved["phases"][:2]})
    assert retreats.dislodged()["FRANCE"] == now.dislodged()["FRANCE"] == {"A BEL": ("RUH",)}


def test_positions_are_those_of_the_record_where_others_judged_otherwise(saved: dict[str, Any]):
    moved = copy.deepcopy(saved)
    state = moved["phases"][3]["state"]
    state["centers"]["FRANCE"] = ["PAR"]
    (board, _), *_ = list(replay_recorded(moved, "it"))[3:]
    assert board.centres()["FRANCE"] == ("PAR",)


def with_change(saved: dict[str, Any], phase: int, *path: str, to: Any) -> dict[str, Any]:
    wrong = copy.deepcopy(saved)
    place = wrong["phases"][phase]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return wrong


REFUSED = {
    "another map": (lambda saved: saved | {"map": "ancmed"}, "it has another map or other rules", "the map 'ancmed'"),
    "unknown rule": (lambda saved: saved | {"rules": ["BUILD_ANY"]}, "it has another map or other rules", "the rule BUILD_ANY"),
    "illegal order": (
        lambda saved: with_change(saved, 0, "orders", "FRANCE", to=["A PAR - MOS"]),
        "an order is not legal",
        "S1901M has the order 'A PAR - MOS' of FRANCE, which is not legal",
    ),
    "nothing to order": (
        lambda saved: with_change(saved, 0, "state", "units", "FRANCE", to=[]),
        "an order is not legal",
        "which is not legal there",
    ),
    "two units in one province": (
        lambda saved: with_change(saved, 3, "state", "units", "FRANCE", to=["A BER", "A BER", "F BER"]),
        "its position contradicts itself",
        "two units are in BER",
    ),
    "phases in no order": (
        lambda saved: saved | {"phases": saved["phases"][::-1]},
        "its phases are in no order",
        "do not follow each other",
    ),
    "no game": (lambda saved: {"phases": [1]}, "it is not in the diplomacy package's format", "it lacks phases with name"),
    "no phase": (lambda saved: {"phases": []}, "it is not in the diplomacy package's format", "it lacks phases with name"),
    "nothing played": (lambda saved: saved | {"phases": saved["phases"][-1:]}, "nothing was played in it", "leave it out"),
    "the game before": (lambda saved: saved | {"id": "another"}, "it occurs twice", "again: pass each game once"),
    "a number": (lambda saved: 7, "it is not in the diplomacy package's format", "it lacks phases with name"),
}


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    return [record(seed, 1) for seed in range(10, 19)]


@pytest.mark.parametrize(("change", "reason", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_a_game_that_cannot_be_read_is_skipped_with_its_reason(
    tmp_path: Path, saved: dict[str, Any], others: list[Any], said: list[str], change: Any, reason: str, sentence: str
):
    file = tmp_path / "games.jsonl"
    few = [saved, *others]
    lines = [json.dumps(game) for game in few]
    file.write_text("\n".join([lines[0], json.dumps(change(saved)), *lines[1:]]))
    positions = Positions(make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, quiet))
    total = sum(len(list(replay_recorded(game, "it"))) for game in few)
    assert len(positions.held_out) + len(positions.training) == total
    (head, line) = said
    assert head.startswith("read 10 recorded games and skipped 1:")
    assert line.split()[0] == "1" and reason in line and sentence in line and f"line 2 of '{file}'" in line


def test_reading_stops_where_too_many_games_are_refused(tmp_path: Path, saved: dict[str, Any], said: list[str]):
    file = tmp_path / "games.jsonl"
    wrong = with_change(saved, 0, "orders", "FRANCE", to=["A PAR - MOS"])
    games = [saved, wrong, wrong, saved | {"map": "ancmed"}, {**saved, "phases": saved["phases"][:4]}]
    file.write_text("".join(json.dumps(each) + "\n" for each in games))
    with pytest.raises(
        EntenteError, match=r"3 of 5 recorded games cannot be read, more than 10%.*an order is not legal.*line 2"
    ) as stopped:
        make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, quiet)
    assert stopped.value.exit_code == 1 and "\n" not in str(stopped.value)
    assert (
        said[0].startswith("read 2 ")
        and [line.split()[0] for line in said[1:]] == ["2", "1"]
        and not list((tmp_path / "games").glob("*"))
    )


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "a file lost"])
def test_an_import_that_was_cut_goes_on_and_gives_the_same_files(
    tmp_path: Path, others: list[Any], said: list[str], monkeypatch: pytest.MonkeyPatch, lost: bool
):
    monkeypatch.setattr(teacher_games, "GAMES_A_SHARD", 2)
    wrong = with_change(others[0], 0, "orders", "FRANCE", to=["A PAR - MOS"])
    file = tmp_path / "games.jsonl"
    games = [others[0], wrong, *others[1:4], others[0], *others[4:]]
    file.write_text("".join(json.dumps(each) + "\n" for each in games))
    settings, replayed = ImitationSettings(recorded=(file,)), list[str]()

    def replay(saved: Any, where: str) -> Any:
        replayed.append(where)
        if len(replayed) == 6:
            raise KeyboardInterrupt
        return replay_recorded(saved, where)

    whole = make_games(tmp_path / "whole", settings, 1, quiet)
    sentences = said[:]
    said.clear()
    monkeypatch.setattr(teacher_games, "replay_recorded", replay)
    with pytest.raises(KeyboardInterrupt):
        make_games(tmp_path / "cut", settings, 1, quiet)
    assert not (tmp_path / "cut" / whole.name).exists()
    if lost:
        (tmp_path / "cut" / f".{whole.name}.reading" / "000000.arrow").unlink()
    cut = make_games(tmp_path / "cut", settings, 1, quiet)
    assert len(replayed) == 6 + len(games) - (0 if lost else 5), "it went on after the four games that it had published"
    assert content(cut) == content(whole)
    first = "is missing. Reading the recorded games again" if lost else "4 recorded games were read before"
    assert first in said[0] and said[1:] == sentences


def test_games_that_are_given_twice_are_left_out_however_many(
    tmp_path: Path, others: list[Any], said: list[str], monkeypatch: pytest.MonkeyPatch
):
    files = tmp_path / "lines", tmp_path / "list"
    files[0].write_text("".join(json.dumps(game) + "\n" for game in others))
    files[1].write_text(json.dumps(others, indent=1))
    both = make_games(tmp_path / "games", ImitationSettings(recorded=files), 1, quiet)
    assert len(Positions(both).training) == len(others) - 1
    assert said[1].split()[0] == str(len(others)) and "it occurs twice" in said[1]
    said.clear()
    assert make_games(tmp_path / "games", ImitationSettings(recorded=files), 1, quiet) == both and not said, "they are read once"
    monkeypatch.setattr(teacher_games, "code_of_play", lambda: {"entente.game": "a release that reads otherwise"})
    assert make_games(tmp_path / "games", ImitationSettings(recorded=files), 1, quiet) != both and said


def test_two_files_are_not_taken_for_one_of_both_their_lists(tmp_path: Path):
    files, joined = [tmp_path / "one", tmp_path / "two"], tmp_path / "joined"
    for number, file in enumerate(files):
        file.write_text(json.dumps([{"id": number}]))
    joined.write_bytes(b"".join(file.read_bytes() for file in files))
    values = [[value for _, value in recorded_files.read_values(some, lambda done: None)] for some in (files, [joined])]
    assert values[0] != values[1]
    assert recorded_files.content_hash(files)[0] != recorded_files.content_hash([joined])[0]


def test_the_order_of_the_files_does_not_change_which_games_are_held_out(tmp_path: Path, others: list[Any], said: list[str]):
    files = tmp_path / "one", tmp_path / "two"
    files[0].write_text(json.dumps(others[:4]))
    files[1].write_text(json.dumps(others[4:]))

    def held_out(given: tuple[Path, ...]) -> set[str]:
        positions = Positions(make_games(tmp_path / "games", ImitationSettings(recorded=given), 1, quiet))
        assert len(positions.training) + len(positions.held_out) == len(others) and len(positions.training)
        return {json.dumps(positions.board(number)[1]) for number in positions.held_out}

    assert held_out(files) == held_out(files[::-1]) != set()


FORMS: dict[str, Callable[[list[Any]], str]] = {
    "one a line": lambda games: "".join(json.dumps(game) + "\n" for game in games),
    "empty lines": lambda games: "\n\n".join(json.dumps(game) for game in games),
    "Windows": lambda games: "".join(json.dumps(game) + "\r\n" for game in games),
    "pretty-printed": lambda games: "\n".join(json.dumps(game, indent=4) for game in games),
    "tabs": lambda games: "\n".join(json.dumps(game, indent="\t") for game in games),
    "a list": lambda games: json.dumps(games),
    "a pretty list": lambda games: json.dumps(games, indent=2),
    "a list of lines": lambda games: "[\n" + ",\n".join(json.dumps(game) for game in games) + "\n]\n",
}


VALUES = [{"a": '[{\\"} ]\n'}, {}, {"b": [{"c": -1.5e10}, None, True]}, {"é": "日本"}, {"d": {"e": {}}}]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_values_depend_neither_on_form_and_encoding_nor_on_the_pieces_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any, encoding: str, piece: int
):
    monkeypatch.setattr(recorded_files, "_PIECE", piece)
    file = tmp_path / "values"
    text = form(VALUES)
    file.write_bytes(text.encode(encoding))
    read: list[int] = []
    found = list(recorded_files.read_values((file, file), read.append))
    assert [value for _, value in found] == [*VALUES, *VALUES] and read[-1] == 2 * file.stat().st_size
    first = [int(place.split()[4]) for place, _ in found[: len(VALUES)]]
    plain = text.replace("\r\n", "\n")
    if "\n" in plain.strip():
        assert all(plain.split("\n")[line - 1].strip(" \t").startswith("{") for line in first) and first == sorted(set(first))


@pytest.mark.parametrize("piece", [1, 5, 1000])
@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ('{"a": 1', "in line 3, column 1"),
        ('{"a": "b', "in line 2"),
        ('{"a": }', "in line 2, column 7"),
        ('{"a" 1}', "in line 2"),
        ("nonsense", "in line 2"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": "' + "b" * 500, "longer than 400 characters"),
    ],
)
def test_what_is_no_json_costs_one_game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, what: str, piece: int):
    monkeypatch.setattr(recorded_files, "_PIECE", piece)
    if "longer" in what:
        monkeypatch.setattr(recorded_files, "_LONGEST", 400)
    file = tmp_path / "values"
    file.write_text(f'{{"a": 0}}\n{broken}\n{{"a": 2}}\n{{"a": 3}}')
    found = list(recorded_files.read_values((file,), lambda done: None))
    assert [value for _, value in found if isinstance(value, dict)] == [{"a": 0}, {"a": 2}, {"a": 3}]
    (error,) = [value for _, value in found if isinstance(value, ValueError)]
    assert what in str(error) and [place.split()[4] for place, _ in found] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["gzip", "bz2", "lzma"])
def test_a_compressed_file_is_named_as_one(tmp_path: Path, name: str):
    file = tmp_path / "games"
    file.write_bytes(importlib.import_module(name).compress(b"{}"))
    with pytest.raises(InputError, match="are compressed: unpack the file first"):
        make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, quiet)


@pytest.mark.parametrize("text", ["", "\n\n", "[]", "[\n]"])
def test_a_file_without_games_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "games.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match="hold 0 games"):
        make_games(tmp_path / "games", ImitationSettings(recorded=(file,)), 1, quiet)
