"""Labelled games: every decision of one seat has the search's answer, and a game depends on its number alone."""

import asyncio

import pytest

from entente.cli.commands import command_line
from entente.game.board import POWERS, Board
from entente.game.snapshot import make_snapshot
from entente.players.policy import PolicyPlayer
from entente.players.search_settings import SearchSettings
from entente.rollouts.label_games import LabelSettings, check_label_settings, label_file, label_game, made_by
from entente.telemetry.errors import InputError
from storage.files import file_lock
from storage.labels import label_path, read_labels

SEARCH = SearchSettings(proposals=1, scripted=("mover", "mover"), playouts=12, player=("random",))
SETTINGS = LabelSettings(years=1, opponents="random,v0", search=SEARCH)


@pytest.fixture
def policy(host, uniform_engine, tokens) -> PolicyPlayer:
    return PolicyPlayer(uniform_engine(), tokens)


def played(policy, host, settings, number=3):
    return asyncio.run(host.run(label_game(number, settings, policy)))


@pytest.mark.parametrize("words", [[], ["--search.years", "2"]], ids=" ".join)
def test_a_search_setting_leaves_the_others_at_the_defaults_of_labels(words: list[str]):
    _, arguments, _ = command_line().parse_args(["label", "one", "--player", "models/small", *words])
    assert (arguments.arguments.get("settings") or LabelSettings()).search.playouts == 80


def test_every_decision_of_the_seat_is_labelled_with_legal_orders(host, policy):
    labels = played(policy, host, SETTINGS)
    assert {label.power for label in labels} == {POWERS[3]}
    assert {"S1901M", "F1901M"} <= {label.phase for label in labels}
    for label in labels:
        board = Board.restore(make_snapshot(label.position, label.phase, source="", game_id="", seed=0))
        legal = board.legal_orders()[label.power]
        assert all(legal.admits(orders.split("; ")) for orders in label.orders)
        assert label.values[label.best] == max(
            value for value, visits in zip(label.values, label.visits, strict=True) if visits == label.visits[label.best]
        )


def test_a_game_repeats_and_the_seat_plays_what_its_share_says(host, policy):
    search, own = (SETTINGS.model_copy(update={"search_share": share}) for share in (1.0, 0.0))
    assert played(policy, host, search) == played(policy, host, search)
    for settings, choice in ((search, lambda label: label.best), (own, lambda label: 0)):
        spring, autumn = (label for label in played(policy, host, settings) if label.phase in ("S1901M", "F1901M"))
        after = Board.restore(make_snapshot(autumn.position, autumn.phase, source="", game_id="", seed=0))
        ordered = after.last_orders[spring.power]
        assert list(ordered) == spring.orders[choice(spring)].split("; ")


def test_a_file_is_made_once_and_not_while_another_process_makes_it(tmp_path, host, policy):
    folder, about = tmp_path / "round-1", made_by(SETTINGS, {"weights": "aa"})
    with file_lock(label_path(folder, 0).with_name(".000000.arrow.lock")):
        assert asyncio.run(host.run(label_file(folder, 0, SETTINGS, policy, about))) == 0
    made = asyncio.run(host.run(label_file(folder, 0, SETTINGS, policy, about)))
    (table,) = read_labels([folder])
    assert made == table.num_rows and set(table["game"].to_pylist()) == {0, 1, 2, 3}
    assert asyncio.run(host.run(label_file(folder, 0, SETTINGS, policy, about))) == 0
    assert [path.name for path in folder.iterdir()] == ["000000.arrow"]


def test_a_search_to_which_the_policy_proposes_nothing_is_refused():
    with pytest.raises(InputError, match="proposals is 0, so the policy would neither propose nor play"):
        check_label_settings(LabelSettings(search=SEARCH.model_copy(update={"proposals": 0})))


def test_unknown_players_are_refused():
    for settings in (LabelSettings(opponents="nobody"), LabelSettings(search=SearchSettings(scripted=("nobody",)))):
        with pytest.raises(InputError, match="nobody"):
            check_label_settings(settings)
