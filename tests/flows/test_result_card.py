"""A result card can be checked and played again by others: a changed one is refused, and a false one is found by playing."""

import asyncio
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli import main
from evaluation.contestants import resolve_contestants
from evaluation.matches import GameResult, plan_match, play_match
from evaluation.result_card import (
    CardPlayer,
    ResultCard,
    first_different_phase,
    make_card,
    playing_environment,
    read_card,
    sampled_games,
    write_card,
)
from evaluation.settings import MatchSettings
from flows import verify_card as verifying
from game.snapshot import Snapshot
from pipeline.card_of_match import card_player, find_card_players
from storage.json_files import sealed
from storage.runs import CARD_FOLDER, RunPaths
from telemetry.errors import EngineError, InputError

MATCH = MatchSettings(players=("mover", "random"), opponents="random", years=1, bootstrap=100)
KEY = "0/3/mover"


def played(match: MatchSettings, held_out: list[Snapshot] | None = None) -> dict[str, GameResult]:
    return {game.key: game for game in asyncio.run(play_match(plan_match(match, 1, held_out or ()), match, {}))}


@pytest.fixture(scope="module")
def card_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("card") / "card.json"
    players = [CardPlayer(name=name) for name in MATCH.players]
    write_card(file, make_card(MATCH, played(MATCH), players, [playing_environment()], 1))
    return file.read_text()


@pytest.fixture
def changed(card_text: str, tmp_path: Path) -> Callable[..., Path]:
    """Writes the card after `change`, with a right checksum."""

    def write(change: Callable[[dict[str, Any]], None] = lambda record: None) -> Path:
        record = json.loads(card_text)
        change(record)
        record.pop("checksum")
        (tmp_path / "card.json").write_text(sealed(record))
        return tmp_path / "card.json"

    return write


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """`entente verify-card` in this process: its exit code and all that it said."""
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)

    def run(*words: str) -> tuple[int, str]:
        code = main.run(["verify-card", *words, "--runs-root", str(tmp_path / "runs")])
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def test_a_card_is_read_back_and_equal_matches_have_equal_cards(card_text: str, changed, tmp_path: Path):
    again = tmp_path / "again.json"
    card = read_card(changed())
    write_card(again, card)
    assert again.read_text() == card_text
    assert len(card.games) == 14 and card.table.players[0].measures["sos"].interval is not None
    assert card_text.count("\n{") == 14, "a game is one line"


def test_all_games_or_a_share_are_played_again_and_nothing_is_left(verify, changed, tmp_path: Path):
    file = str(changed())
    code, said = verify(file)
    assert code == 0 and "14 of 14 games were played again: 14 equal, 0 different" in said and "otherwise" not in said
    code, said = verify(file, "--share", "0.1", "--seed", "5")
    assert code == 0 and "2 of 14 games were played again, chosen by --seed 5: 2 equal" in said
    assert list((tmp_path / "runs" / CARD_FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda card: card["games"][0]["centres"].reverse(), "the table of card '{}' does not follow from its games: pairs.0."),
        (lambda card: card["table"]["players"][0]["measures"]["sos"].update(mean=0.5), "does not follow from its games"),
        (
            lambda card: card["games"][3]["seats"].update(FRANCE="mover"),
            "game 0/1/random is not the one",
        ),
        (lambda card: card["games"].pop(), "it lacks 1 games of its last round"),
        (lambda card: card["settings"].update(protocol="six-dumbbots-1908"), "names protocol 'six-dumbbots-1908', but its years"),
        (lambda card: card["settings"].update(bootstrap=10**9), "more than 100,000 resamples"),
        (lambda card: card["players"].pop(), "its players are not those of its settings"),
        (lambda card: card["games"][0].update(rejected="none"), "is damaged: games.0.rejected: "),
        (lambda card: card.update(card=2), "is no result card of this release"),
    ],
    ids=lambda each: None if callable(each) else each[:30],
)
def test_a_card_that_does_not_follow_from_itself_is_one_sentence(verify, changed, change, sentence: str):
    code, said = verify(str(file := changed(change)))
    assert code == 2 and sentence.format(file) in " ".join(said.split()) and said.count("entente:") == 1


def test_a_card_that_was_changed_is_refused(verify, changed, tmp_path: Path):
    file = changed()
    file.write_text(file.read_text().replace('"at_once": 28', '"at_once": 27'))
    code, said = verify(str(file))
    assert code == 2 and f"card '{file}' was changed: its checksum is not that of its content" in said
    (tmp_path / "cut.json").write_text(file.read_text()[:300])
    assert verify(str(tmp_path / "cut.json"))[0] == 2 and verify(str(tmp_path / "none.json"))[0] == 2


def lied(card_text: str) -> ResultCard:
    """A card with a better result of one game, everything else made to fit."""
    card = ResultCard.model_validate(json.loads(card_text))
    games = {game.key: game for game in card.games}
    first = games[KEY]
    better = tuple(count + (power == first.measured[0]) for power, count in zip(first.seats, first.centres, strict=True))
    return make_card(card.settings, games | {KEY: replace(first, centres=better)}, card.players, card.environments, 1)


def test_a_card_that_lies_is_found_by_playing_its_games_again(verify, card_text: str, tmp_path: Path):
    write_card(tmp_path / "lie.json", lied(card_text))
    for _ in range(2):  # the second time too, nothing is remembered
        code, said = verify(str(tmp_path / "lie.json"))
        assert code == 1 and f"game {KEY} differs in its result\n" in said and "13 equal, 1 different" in said


def test_the_first_different_phase_is_named_in_the_order_of_play(card_text: str):
    stated = next(game for game in ResultCard.model_validate(json.loads(card_text)).games if len(game.phases) > 3)
    true = played(MATCH)[stated.key]
    other = replace(true, phases={phase: "0" * 8 if phase > "F1901M" else value for phase, value in true.phases.items()})
    assert first_different_phase(stated, true) == "" and next(iter(stated.phases)) == "F1901M"
    assert first_different_phase(stated, other) == "S1901M"
    assert first_different_phase(replace(stated, phases={}), other) == "", "an earlier release kept no phases"
    assert first_different_phase(stated, replace(true, ended="won")) == "the end"


def test_an_interrupted_verification_plays_what_is_missing(changed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    card = read_card(changed())
    counted: list[int] = []

    async def breaks_off(plans, settings, deciders, on_game):
        counted.append(len(plans))
        await play_match(plans[:3], settings, deciders, on_game)
        raise EngineError("the power went out")

    async def whole(plans, settings, deciders, on_game):
        counted.append(len(plans))
        return await play_match(plans, settings, deciders, on_game)

    def verify(seed: int | None) -> verifying.Verification:
        players, _ = find_card_players(card.players, {}, tmp_path)
        return asyncio.run(verifying.verify_card(card, players, tmp_path, {"torch": "2"}, 0.5, seed))

    monkeypatch.setattr(verifying, "play_match", breaks_off)
    with pytest.raises(EngineError):
        verify(None)
    monkeypatch.setattr(verifying, "play_match", whole)
    done = verify(None)
    assert counted == [7, 4] and done.games == 7 and done.different == {}
    assert verify(done.seed) == done and counted[-1] == 7, "a new verification plays all of them again"


def test_a_share_is_drawn_by_the_seed(changed):
    card = read_card(changed())
    drawn = [sampled_games(card, 0.5, seed) for seed in range(20)]
    assert {len(each) for each in drawn} == {7} and len({tuple(each) for each in drawn}) > 15
    assert drawn[0] == sampled_games(card, 0.5, 0) and sampled_games(card, 1, 3) == list(range(14))
    assert len(sampled_games(card, 0.001, 0)) == 1


def test_what_is_otherwise_here_is_said(verify, changed):
    def other_machine(record: dict[str, Any]) -> None:
        record["environments"][0].update(torch="1.0\x1b[2J")

    code, said = verify(str(changed(other_machine)), "--share", "0.1")
    assert code == 0 and "otherwise here: torch 1.0\\x1b[2J, here " in said, "a card moves no terminal's cursor"


def test_a_card_holds_the_held_out_positions_that_its_games_begin_from(positions: list[Snapshot], tmp_path: Path):
    match = MATCH.model_copy(update={"start": "held-out", "players": ("mover",)})
    write_card(
        tmp_path / "card.json",
        make_card(match, played(match, positions), [CardPlayer(name="mover"), CardPlayer(name="random")], [], 1, positions),
    )
    card = read_card(tmp_path / "card.json")
    assert card.starts == tuple(positions[:1]) and card.plans() == plan_match(match, 1, positions)


def test_an_endpoint_has_no_card_and_a_folder_of_the_machine_is_not_named():
    with pytest.raises(InputError, match="must be repeatable by others, and what 'openai:"):
        make_card(MATCH.model_copy(update={"opponents": "openai:x@http://127.0.0.1:1/v1"}), {}, [], [], 1)
    match = MATCH.model_copy(update={"players": ("/srv/models/small", "random")})
    games = {
        plan.key: replace(game, key=plan.key, seats=plan.seats)
        for plan, game in zip(plan_match(match, 1), played(MATCH).values(), strict=True)
    }
    card = make_card(match, games, [CardPlayer(name=name) for name in match.players], [], 1)
    assert "/srv" not in card.model_dump_json() and card.settings.players == ("small", "random")
    assert {"small", "random"} == set(card.games[0].seats.values())


def test_a_model_is_found_by_its_hash_or_where_it_is_said_to_be(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, tmp_path / "mine")
    (player,) = resolve_contestants(["./mine+search"], "", tmp_path / "runs")
    wanted = card_player(player, tmp_path / "runs").model_copy(update={"name": "models/published+search"})
    assert wanted.engine == "torch" and len(wanted.weights) == 64
    with pytest.raises(InputError, match="no model here is the card's player 'models/published' "):
        find_card_players([wanted], {}, tmp_path / "runs")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "no-model").mkdir()
    shutil.copytree(model, tmp_path / "models" / "renamed")
    for given in ({}, {"models/published": "./mine"}):
        ((found,), notes) = find_card_players([wanted], given, tmp_path / "runs")
        assert (found.name, found.searches, found.model is not None, notes) == ("models/published+search", True, True, [])
    weights = next((tmp_path / "mine").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InputError, match=r"'./mine' is not the card's player 'models/published': it has other weights"):
        find_card_players([wanted], {"models/published": "./mine"}, tmp_path / "runs")
    with pytest.raises(InputError, match="the card has no player 'other': its players are models/published"):
        find_card_players([wanted], {"other": "./mine"}, tmp_path / "runs")


@pytest.mark.system
def test_a_match_writes_a_card_that_verifies(entente, prefect_server):
    words = ("--players", "mover", "--opponents", "random", "--years", "1", "--games", "7", "--card", "mine.json")
    first = entente.process("evaluate", *words, PREFECT_API_URL=prefect_server)
    assert first.returncode == 0 and "`entente verify-card mine.json` plays its games again" in first.stdout, first.stderr
    checked = entente("verify-card", "mine.json", "--json")
    assert checked.returncode == 0, checked.stderr
    found = json.loads(checked.stdout.splitlines()[-1])
    assert (found["games"], found["different"], found["otherwise_here"]) == (7, {}, [])
    again = entente("evaluate", *words)
    assert again.returncode == 2 and "there is 'mine.json' already" in again.stderr


def test_a_version_of_a_run_is_found_under_another_name_of_the_run(run_of_before: RunPaths):
    root = run_of_before.root.parent
    players = resolve_contestants(["v2", "base"], "before", root)
    version, base = (card_player(player, root) for player in players)
    assert (version.run, version.version, len(version.adapter), base.adapter) == ("before", 2, 32, "")
    assert version.weights == base.weights and version.prompts is not None
    run_of_before.root.rename(root / "renamed")
    found, _ = find_card_players([version, base], {}, root)
    assert [(player.name, player.run, player.version) for player in found] == [("v2", "renamed", 2), ("v0", "renamed", 0)]
    with pytest.raises(InputError, match="'renamed:v1' is not the card's player 'v2': it has other adapter"):
        find_card_players([version, base], {"v2": "renamed:v1"}, root)
