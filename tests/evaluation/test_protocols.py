"""Protocols are today's matches under a name: what each asks is fixed, and its games are those of an equal match without one."""

import pytest

from entente.evaluation.match_files import match_label
from entente.evaluation.matches import GAMES_PER_ROUND, plan_match
from entente.evaluation.protocols import check_protocol, part_of_protocol, protocol_match, protocols, usual_protocol
from entente.evaluation.settings import MatchSettings
from entente.game.board import POWERS
from entente.telemetry.errors import InputError


def asked(name: str, *players: str, opponents: str = "", **settings: object) -> MatchSettings:
    return MatchSettings.model_validate(protocol_match(name, players, opponents, settings))


@pytest.mark.parametrize("name", protocols())
def test_each_is_a_match_of_whole_rounds_that_holds_to_itself(name: str):
    match = asked(name, "mover")
    check_protocol(match)
    assert match.games % GAMES_PER_ROUND == 0 and match.how() == f"protocol {name}" and not part_of_protocol(match)
    assert (match.games, match.years) == {"one-table": (70, 6), "gunboat-1910": (210, 10)}.get(name, (210, 20))


def test_a_part_of_a_protocol_is_counted_in_games_played_which_are_whole_rounds():
    assert part_of_protocol(asked("whole-game", "mover", games=205)) == ""
    assert part_of_protocol(asked("whole-game", "mover", games=20)).endswith("whole-game: 21 of its 210 games")


def test_the_reverse_seats_one_dumbbot_on_every_power_among_six_of_ours():
    plans = plan_match(asked("whole-game-reverse", "mover"), 1)
    assert [plan.measured for plan in plans] == [(power,) for power in (POWERS[0], *reversed(POWERS[1:]))]
    for plan in plans:
        (power,) = plan.measured
        assert plan.seats[power] == "dumbbot" and [plan.seats[each] for each in POWERS if each != power] == ["mover"] * 6


@pytest.mark.parametrize(
    ("words", "settings", "sentence"),
    [
        (("seven-dumbbots", "mover"), {}, "there is no protocol 'seven-dumbbots': the protocols are one-table, whole-game"),
        (("one-table",), {}, "takes players"),
        (("whole-game-reverse", "mover", "random"), {}, "one player has six seats: name one player, not 2"),
        (("whole-game", "mover"), {"years": 3, "opponents": "random"}, "fixes what --years, --opponents would set"),
    ],
)
def test_what_a_protocol_does_not_take_is_one_sentence(words: tuple[str, ...], settings: dict, sentence: str):
    with pytest.raises(InputError, match=sentence):
        asked(*words, **settings)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("whole-game", {"years": 9}, "its years are not"),
        ("whole-game", {"opponents": "random"}, "its opponents are not"),
        ("whole-game", {"measure": "win"}, "its measure are not"),
        ("gunboat-1910", {"opponents": ""}, "its opponents are not"),
        ("square-score-reverse", {"players": ("dumbbot", "random")}, "its players are not"),
        ("whole-game-reverse", {"opponents": ""}, "takes players"),
    ],
)
def test_a_match_cannot_bear_the_name_of_a_protocol_that_it_does_not_follow(name: str, change: dict, sentence: str):
    with pytest.raises(InputError, match=sentence):
        check_protocol(asked(name, "mover").model_copy(update=change))


@pytest.mark.parametrize("name", [name for name, each in protocols().items() if each.any_opponent])
def test_some_take_another_opponent_and_dumbbots_if_none_is_named(name: str):
    usual, other = asked(name, "mover"), asked(name, "mover", opponents="territorial")
    check_protocol(other)
    reverse = name.endswith("-reverse")
    assert (usual.players, usual.opponents) == (("dumbbot",), "mover") if reverse else (("mover",), "dumbbot")
    assert (other.players, other.opponents) == (("territorial",), "mover") if reverse else (("mover",), "territorial")
    with pytest.raises(InputError, match="but its years are not that protocol's"):
        check_protocol(other.model_copy(update={"years": 9}))


def test_two_seeds_of_a_protocol_are_two_questions_with_other_dice():
    usual, other = asked("whole-game", "mover"), asked("whole-game", "mover", seed=7)
    check_protocol(other)
    assert other.how() == "protocol whole-game; seed 7" and match_label(usual, []) != match_label(other, [])


def test_the_folder_of_a_model_plays_whole_games_if_nothing_else_is_asked():
    assert usual_protocol(["models/small+search", "dumbbot"], (), {"games": 7}) == "whole-game"
    for players, opponents, asked_for in (
        (["models/small"], ("dumbbot",), {}),
        (["models/small"], (), {"years": 3}),
        (["newest", "openai:m@http://host/v1"], (), {}),
    ):
        assert usual_protocol(players, opponents, asked_for) == ""
