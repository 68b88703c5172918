"""Matches: every player plays all powers equally often, with the same starts and random numbers; counts add up."""

import asyncio
import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entente.evaluation.contestants import Contestant, check_searches, resolve_contestants, resolve_version
from entente.evaluation.match_files import MatchRecord, append_game, match_label, read_games, read_matches, write_match
from entente.evaluation.match_table import conclusions, match_table
from entente.evaluation.matches import GameResult, plan_match, play_match
from entente.evaluation.settings import MatchSettings
from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.players.policy import PolicyPlayer
from entente.players.search_settings import SearchSettings
from entente.players.seeds import seeded_rng
from entente.records.policy_version import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from entente.rollouts.label_games import LabelSettings, made_by
from entente.telemetry.errors import EngineError, InputError
from flows.open_players import open_players
from storage.control import code_of_play
from storage.runs import RunPaths
from tests.evaluation.test_strength import Holds

MIXED = MatchSettings(players=("dumbbot", "mover", "random"), years=1)
ALONE = MIXED.model_copy(update={"opponents": "random"})


def played(settings: MatchSettings, rounds: int = 2, deciders=None, held_out=()) -> list[GameResult]:
    return asyncio.run(play_match(plan_match(settings, rounds, held_out), settings, deciders or {}))


@pytest.mark.parametrize("settings", [MIXED, ALONE], ids=["one table", "against six"])
def test_every_player_is_counted_on_every_power_equally_often(settings: MatchSettings):
    """Over as many rounds as there are players, so that each player has had the extra seats."""
    counted = Counter((plan.seats[power], power) for plan in plan_match(settings, 3) for power in plan.measured)
    for name in settings.players:
        seats = {counted[name, power] for power in POWERS}
        assert len(seats) == 1 and seats != {0}, name


def test_players_that_are_compared_meet_the_same_starts_powers_and_luck(positions):
    plans = plan_match(ALONE.model_copy(update={"start": "held-out"}), 3, positions)
    pairs: dict[str, list] = {}
    for plan in plans:
        pairs.setdefault(plan.pair, []).append(plan)
    assert len(pairs) == 21
    for same in pairs.values():
        assert len(same) == 3 and len({plan.start.snapshot_id for plan in same}) == 1 and len({p.measured for p in same}) == 1


def test_players_that_decide_alike_play_the_same_games():
    """What others roll hangs on the seat and the round, not on who is measured."""
    games = played(ALONE.model_copy(update={"players": ("hold", "v1")}), deciders={"v1": Holds()})
    pairs = {pair: [game.centres for game in games if game.pair == pair] for pair in {game.pair for game in games}}
    assert len(pairs) == 14 and all(one == other for one, other in pairs.values())
    assert len({one for one, _ in pairs.values()}) > 7


def test_games_from_one_source_game_are_one_cluster_and_other_games_are_on_their_own(positions):
    twins = [positions[0], positions[1], positions[0]]
    held_out = plan_match(MIXED.model_copy(update={"start": "held-out"}), 3, twins)
    assert {plan.cluster: sum(each.cluster == plan.cluster for each in held_out) for plan in held_out} == {
        "game-0": 14,
        "game-1": 7,
    }
    standard = plan_match(MIXED, 3)
    assert len({plan.cluster for plan in standard}) == len(standard) == 21


def test_a_game_is_what_playing_it_out_gives():
    """Oracle: a loop over boards without the match code, with the seats rotated by hand."""
    game = played(MIXED)[1]  # round 0, rotated by one
    assert [game.seats[power] for power in POWERS] == ["mover", "random", "dumbbot", "mover", "random", "dumbbot", "dumbbot"]
    board = Board.start()
    while board.year == 1901:
        orders = {
            power: player(game.seats[power])(legal, seeded_rng(f"match/{MIXED.seed}/0/1", board.phase, power), board)
            for power, legal in board.legal_orders().items()
        }
        board.step(orders)
    assert game.centres == board.centre_counts() and game.ended == "horizon" and game.start == (3, 3, 3, 3, 3, 4, 3)
    assert game.by_year == (game.centres,)


def test_a_failed_game_is_no_result(uniform_engine, tokens):
    settings = MIXED.model_copy(update={"players": ("v1", "random")})
    with pytest.raises(EngineError, match="game 0/0 of the match failed"):
        played(settings, deciders={"v1": PolicyPlayer(uniform_engine(fails=lambda request: True), tokens, 1)})


def made_up(centres_by_round: list[dict[str, int]]) -> list[GameResult]:
    """Games of two players with equal results in all seats of a round."""
    games = []
    for number, centres in enumerate(centres_by_round):
        for turn in range(7):
            seats = {power: ("a", "b")[(place + turn) % 2] for place, power in enumerate(POWERS)}
            games.append(
                GameResult(
                    key=f"{number}/{turn}",
                    cluster=f"round {number}",
                    pair=f"{number}/{turn}",
                    seats=seats,
                    measured=POWERS,
                    start=(3,) * 7,
                    centres=tuple(centres[seats[power]] for power in POWERS),
                    phase="S1902M",
                    ended="horizon",
                    rejected=0,
                    by_year=((3,) * 7, tuple(centres[seats[power]] for power in POWERS))[1 - number % 2 :],
                )
            )
    return games


def test_a_game_that_has_ended_stays_as_it_ended_in_the_centres_by_year():
    """All games end with 9 centres; those of the second round have a year with 3 before."""
    (player, *_) = match_table(made_up([{"a": 9, "b": 9}] * 2), MatchSettings(players=("a", "b"))).players
    assert player.years.mean == 1.5 and [year.mean for year in player.by_year] == [6, 9]


def test_the_seven_games_of_a_round_carry_the_information_of_one():
    """Results vary only between rounds, so the seven games of a round must not make the interval narrower."""
    dice_rolls = np.random.default_rng(3).integers(0, 8, 40)
    games = made_up([{"a": int(roll), "b": 3} for roll in dice_rolls])
    settings = MatchSettings(players=("a", "b"), measure="centres")
    estimate = match_table(games, settings).players[0].measures["centres"]
    expected = 2 * 1.96 * dice_rolls.std(ddof=1) / np.sqrt(40)
    assert estimate.high - estimate.low == pytest.approx(expected, rel=0.15)


def test_differences_are_paired_so_luck_that_both_share_cancels():
    rolls = np.random.default_rng(5).integers(0, 8, 20)
    games = made_up([{"a": int(roll) + 1, "b": int(roll)} for roll in rolls])
    (pair,) = match_table(games, MatchSettings(players=("a", "b"), measure="centres")).pairs
    assert pair.difference.mean == pytest.approx(1) and pair.difference.high - pair.difference.low < 1e-9


def test_shares_that_are_equal_in_all_rounds_do_not_show_that_the_players_are():
    """Nobody wins alone in 20 rounds: up to Wilson's end for none of 20, one of the two may do so more often."""
    settings = MatchSettings(players=("a", "b"), measure="solo")
    (pair,) = match_table(made_up([{"a": 9, "b": 3}] * 20), settings).pairs
    assert pair.difference.interval == pytest.approx((-0.161, 0.161), abs=1e-3)


def test_few_rounds_at_one_table_show_no_difference_and_say_how_many_it_takes():
    """Two rounds of seven games allow intervals of the players, but not of their difference."""
    settings = MatchSettings(players=("a", "b"), measure="centres")
    games = [replace(game, cluster=f"game {game.key}") for game in made_up([{"a": 9, "b": 3}] * 2)]
    table = match_table(games, settings)
    (pair,) = table.pairs
    assert (pair.difference.interval, pair.difference.clusters, pair.games_to_show) == (None, 2, None)
    assert conclusions(table, settings) == [
        "no difference between a and b is shown: by +6.000 (centres), no interval: 2 rounds, and an interval takes 6"
    ]
    assert all(player.measures["centres"].interval is not None for player in table.players)


def test_a_match_is_kept_game_by_game_and_read_back(tmp_path: Path):
    paths, games, label = RunPaths(tmp_path), played(MIXED), "label"
    for game in games[:3]:
        append_game(paths.matches, label, game)
    with open(tmp_path / "scores" / "matches" / "label.jsonl", "ab") as file:
        file.write(b'\n{"key": "cut in the mid')
    append_game(paths.matches, label, games[3])
    assert read_games(paths.matches, label) == {game.key: game for game in games[:4]}
    players = tuple(Contestant(name=name) for name in MIXED.players)
    record = MatchRecord(label=label, settings=MIXED, players=players, table=match_table(games, MIXED))
    write_match(paths.matches, record)
    assert read_matches(paths.matches) == [record]
    earlier = replace(record, label="later by name", finished=1.0)
    write_match(paths.matches, replace(record, finished=2.0))
    write_match(paths.matches, earlier)
    assert read_matches(paths.matches)[0] == earlier, "a copy of a run has other file times"


def test_the_label_is_of_the_question_and_not_of_how_much_is_played():
    old, new = (
        Contestant(name="v1", run="a", version=1, adapter_hash="x"),
        Contestant(name="v1", run="a", version=1, adapter_hash="y"),
    )
    more = MIXED.model_copy(update={"games": 700, "concurrency": 1})
    assert match_label(MIXED, [old]) == match_label(more, [old])
    assert match_label(MIXED, [old]) != match_label(MIXED, [new])
    assert match_label(MIXED, [old]) != match_label(MIXED.model_copy(update={"seed": 1}), [old])


def test_games_from_other_held_out_positions_are_another_match(positions):
    """A state cache that was lost may be built again with others; a longer match would mix them under the same keys."""
    settings, whole = MIXED.model_copy(update={"start": "held-out"}), list(positions)
    assert match_label(settings, [], whole) == match_label(settings, [], list(whole)) != match_label(settings, [], whole[1:])


def test_a_run_that_was_made_again_from_another_base_or_with_other_prompts_plays_another_match(tmp_path: Path):
    paths, labels, fingerprints = RunPaths(tmp_path / "a").create(), set[str](), set[str]()
    for base, own_line in [("x", "last"), ("y", "last"), ("y", "in_place")]:
        paths.settings.write_text(json.dumps({"prompts": {"own_line": own_line}}))
        paths.base.write_text(json.dumps({"model.safetensors": base}))
        (base_model,) = resolve_contestants(("a:base",), "", tmp_path)
        labels.add(match_label(MIXED, [base_model]))
        fingerprints.add(base_model.fingerprint)
    assert len(labels) == len(fingerprints) == 3


@pytest.mark.parametrize("with_adapter", [False, True], ids=["model", "adapter"])
def test_a_folder_with_another_recipe_template_end_token_or_start_token_plays_another_match_and_makes_other_labels(
    with_adapter: bool, tmp_path: Path
):
    base = folder = shutil.copytree(Path(__file__).parents[2] / "models" / "whole-192", tmp_path / "base")
    recipe = json.loads((base / "recipe.json").read_text())
    if with_adapter:
        folder = tmp_path / "adapter"
        folder.mkdir()
        (folder / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": str(base)}))
        (folder / ADAPTER_WEIGHTS).write_bytes(b"")
    made, labels, fingerprints = list[dict[str, Any]](), set[str](), set[str]()

    def plays() -> None:
        players = resolve_contestants((str(folder),), "", tmp_path)
        labels.add(match_label(MIXED, players))
        made.append(made_by(LabelSettings(), players[0].identity))
        fingerprints.add(players[0].fingerprint)

    plays()
    plays()
    assert len(labels) == 1 and made[0] == made[1]
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plays()
    (folder / "recipe.json").write_text(json.dumps({"prompts": recipe["prompts"] | {"examples": 2}}))
    plays()
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    plays()
    tokenizer = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"bos_token": "A", "add_bos_token": True}))
    plays()
    assert len(labels) == len(fingerprints) == 5 and all(before != after for before, after in itertools.pairwise(made[1:]))


def test_a_program_that_plays_differently_does_not_continue_a_match(monkeypatch):
    before = match_label(MIXED, [])
    monkeypatch.setattr("entente.evaluation.match_files.code_of_play", lambda _: {**code_of_play(), "entente.players": "changed"})
    assert match_label(MIXED, []) != before
    assert code_of_play().keys() == {"entente.game", "entente.players", "diplomacy"}


def test_a_scripted_player_that_searches_needs_no_engine(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("flows.open_players.usable_cores", lambda: 1)  # no processes, which take seconds to start
    players = resolve_contestants(["mover+search", "mover"], "mine", tmp_path)
    assert [(player.name, player.searches, player.is_policy) for player in players] == [
        ("mover+search", True, False),
        ("mover", False, False),
    ]
    quick = SearchSettings(proposals=2, scripted=(), playouts=4, player=("mover",))
    settings = ALONE.model_copy(update={"players": ("mover+search", "mover"), "opponents": "mover", "search": quick})

    async def match() -> list[GameResult]:
        async with open_players(players, tmp_path, settings) as opened:
            assert list(opened.deciders) == ["mover+search"] and not opened.served
            return await play_match(plan_match(settings, 1)[:4], settings, opened.deciders)

    games = asyncio.run(match())
    assert sum(game.rejected for game in games) == 0
    searched, alone = (
        next(game for game in games if name in (game.seats[p] for p in game.measured)) for name in settings.players
    )
    assert searched.pair == alone.pair and searched.centres != alone.centres


def test_a_search_that_cannot_be_made_is_refused_before_an_engine_is_opened(tmp_path: Path):
    (player,) = resolve_contestants(["mover+search"], "mine", tmp_path)
    settings = MIXED.model_copy(update={"search": SearchSettings(player=("nobody",))})
    with pytest.raises(InputError, match="no scripted player 'nobody'"):
        check_searches([player], settings)


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["nobody"], "there is no player 'nobody': name a version"),
        (["v7"], "run 'mine' has no policy version 7; its newest is 0"),
        (["base", "newest"], "player 'v0' is named twice"),
        (["models/none"], "there is no folder 'models/none', so it cannot play: name the folder of a model"),
    ],
)
def test_players_that_cannot_play_are_refused(names: list[str], complaint: str, tmp_path: Path):
    RunPaths(tmp_path / "mine").create().settings.write_text("{}")
    with pytest.raises(InputError, match=complaint):
        resolve_contestants(names, "mine", tmp_path)


def test_a_folder_is_not_taken_for_the_scripted_player_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(Path(__file__).parents[2] / "models" / "whole-192", tmp_path / "dumbbot")
    monkeypatch.chdir(tmp_path)
    players = resolve_contestants(("./dumbbot/", "dumbbot"), "", tmp_path)
    assert [(player.name, player.is_policy) for player in players] == [("./dumbbot", True), ("dumbbot", False)]
    assert resolve_contestants([player.name for player in players], "", tmp_path) == players, "a stored name is found again"


@pytest.mark.parametrize(
    ("players", "enough", "complaint"),
    [
        (7, 1, None),
        (8, 3, r"in 14 games not every one of 8 players meets v0, .*: play at least --games 21$"),
        (13, 8, r"in 49 games not every one of 13 players meets v0, .*: play at least --games 56$"),
        (14, 3, r"in 14 games not every one of 14 players meets v0, .*: play at least --games 21$"),
        (20, 4, r"in 21 games not every one of 20 players meets v0, .*: play at least --games 28$"),
    ],
)
def test_a_table_at_which_some_player_does_not_meet_the_first_is_refused(players: int, enough: int, complaint: str | None):
    settings = MatchSettings(players=tuple(f"v{number}" for number in range(players)))
    if complaint is not None:
        with pytest.raises(InputError, match=complaint):
            plan_match(settings, enough - 1)
    even = {"start": (3,) * 7, "centres": (3,) * 7, "phase": "", "ended": "horizon", "rejected": 0, "by_year": ((3,) * 7,)}
    plans = plan_match(settings, enough)
    games = [GameResult(key=p.key, cluster=p.cluster, pair=p.pair, seats=p.seats, measured=p.measured, **even) for p in plans]
    assert [pair.difference.mean for pair in match_table(games, settings).pairs] == [0] * (players - 1)
    plan_match(settings.model_copy(update={"opponents": "random"}), 1)


def test_a_version_below_zero_was_never_there(tmp_path: Path):
    with pytest.raises(InputError, match="there is no policy version -5: versions are numbers from 0, or -1 for the newest"):
        resolve_version(RunPaths(tmp_path / "mine").create(), "mine", -5)
