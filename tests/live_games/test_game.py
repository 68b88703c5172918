"""A game in the browser: whose turn it is, what may be ordered, undo, and players that fail."""

import asyncio
import json
from pathlib import Path

import pytest

from entente.game.snapshot import POWERS
from entente.live_games.game import Choice, PlayedGame, StaleError
from entente.live_games.game_file import GameFile, open_game, saved
from entente.live_games.page import as_data
from entente.players.policy import DecisionRequest
from entente.players.search_settings import MOST_PROPOSALS
from entente.telemetry.errors import EngineError, InputError
from storage.played_games import SavedProposal, read_game


def order(game: PlayedGame, power: str, *orders: str) -> None:
    asyncio.run(game.order(power, orders, game.revision))


def test_a_phase_is_played_when_all_people_have_ordered_and_phases_without_them_follow(new_game, bots):
    game = new_game("FRANCE", "TURKEY")
    order(game, "FRANCE", "A PAR - BUR")
    assert game.board.phase == "S1901M" and game.waits_for == ("TURKEY",) and not bots.asked
    order(game, "TURKEY")
    assert game.board.phase == "F1901M" and game.waits_for == ("FRANCE", "TURKEY")
    assert game.turns[0].orders["FRANCE"] == ("F BRE H", "A MAR H", "A PAR - BUR"), "units without an order hold"
    assert (
        len(game.turns[0].orders) == 7
        and game.turns[0].probabilities["ITALY"] == 0.5
        and "FRANCE" not in game.turns[0].probabilities
    )
    order(game, "FRANCE")
    order(game, "TURKEY")
    assert all(power in game.board.legal_orders() for power in game.waits_for) and game.waits_for
    assert game.board.phase not in ("F1901M", "F1901R"), "phases in which people have nothing to order pass by"


@pytest.mark.parametrize(
    ("power", "orders", "said"),
    [
        ("ITALY", [], "ITALY is played by random"),
        ("FRANCE", ["A PAR - MOS"], "'A PAR - MOS' is no legal order of FRANCE in S1901M"),
        ("FRANCE", ["A PAR - BUR", "A PAR - PIC"], "'A PAR - PIC' is no legal order of FRANCE in S1901M, or a second one"),
    ],
)
def test_orders_of_others_and_illegal_ones_are_refused_and_the_game_stays(new_game, power, orders, said):
    game = new_game("FRANCE")
    with pytest.raises(InputError, match=f"^{said}"):
        order(game, power, *orders)
    assert not game.turns and not game.pending and game.revision == 0


def test_a_request_about_a_position_that_the_game_has_left_is_refused(new_game):
    game = new_game("FRANCE", "TURKEY")
    order(game, "FRANCE")
    for stale in (game.order("TURKEY", [], 0), game.undo(0, 0), game.go_on(0), game.hint("TURKEY", "dumbbot", 0)):
        with pytest.raises(StaleError):
            asyncio.run(stale)
    with pytest.raises(StaleError, match="another window"):
        order(game, "FRANCE")


def test_hints_of_two_players_for_one_power_are_two_requests_with_one_seed(new_game, bots, monkeypatch):
    """An engine refuses two requests of one id that differ, as those of two windows would."""
    game, requests = new_game("FRANCE"), []

    async def choose(_: str, request: DecisionRequest) -> Choice:
        requests.append(request)
        return Choice(orders=())

    async def both() -> None:
        await asyncio.gather(*(game.hint("FRANCE", player, 0) for player in bots.names))

    monkeypatch.setattr(bots, "choose", choose)
    asyncio.run(both())
    assert len({each.game for each in requests}) == 2 and {each.rng_name for each in requests} == {"a-game/0/hint"}


def test_a_hint_is_of_the_position_it_was_asked_for_and_of_no_later_one(new_game, bots, monkeypatch):
    game, phases = new_game("FRANCE"), []
    choose = bots.choose

    async def slowly(name: str, request: DecisionRequest) -> Choice:
        while not game.turns and name == "dumbbot":
            await asyncio.sleep(0)
        phases.append(request.board.phase)
        return await choose(name, request)

    async def both() -> None:
        hint = asyncio.create_task(game.hint("FRANCE", "dumbbot", 0))
        await asyncio.sleep(0)
        await game.order("FRANCE", [], 0)
        with pytest.raises(StaleError, match="moved on while dumbbot chose: ask again"):
            await hint

    monkeypatch.setattr(bots, "choose", slowly)
    asyncio.run(both())
    assert game.board.phase == "F1901M" and set(phases) == {"S1901M"}


def test_after_an_undo_equal_orders_meet_equal_answers_and_others_do_not_change_the_dice(new_game):
    game = new_game("FRANCE")
    order(game, "FRANCE", "A PAR - BUR")
    first = game.turns[0].orders
    asyncio.run(game.undo(0, game.revision))
    assert game.board.phase == "S1901M" and not game.turns
    order(game, "FRANCE", "A PAR - PIC")
    assert {**first, "FRANCE": ()} == {**game.turns[0].orders, "FRANCE": ()}
    with pytest.raises(InputError, match="no position 1"):
        asyncio.run(game.undo(1, game.revision))


def test_after_a_failed_decision_the_orders_stay_given_and_the_phase_can_be_tried_again(new_game, bots):
    game = new_game("FRANCE")
    bots.fails = True
    with pytest.raises(EngineError):
        order(game, "FRANCE", "A PAR - BUR")
    assert not game.turns and not game.is_deciding and game.pending
    bots.fails = False
    asyncio.run(game.go_on(game.revision))
    assert game.turns[0].orders["FRANCE"][2] == "A PAR - BUR"


def test_two_people_who_order_at_the_same_time_play_the_phase_once(new_game, bots):
    game = new_game("FRANCE", "ENGLAND")

    async def play() -> None:
        stored = asyncio.Event()

        async def keep_slowly() -> None:
            await stored.wait()

        game.keep = keep_slowly
        first = asyncio.create_task(game.order("FRANCE", ["A PAR - BUR"], game.revision))
        await asyncio.sleep(0)
        second = asyncio.create_task(game.order("ENGLAND", [], game.revision))
        await asyncio.sleep(0)
        stored.set()
        await asyncio.gather(first, second)

    asyncio.run(play())
    assert [turn.board.phase for turn in game.turns] == ["S1901M"] and len(bots.asked) == 5


def play_two_phases(game: PlayedGame, file: Path) -> None:
    kept = GameFile(file)
    game.keep = lambda: kept.write(game)
    order(game, "FRANCE", "A PAR - BUR")
    order(game, "TURKEY")
    order(game, "FRANCE", "A BUR - BEL")


def test_a_stored_game_is_continued_with_the_orders_that_were_given(new_game, bots, tmp_path):
    game = new_game("FRANCE", "TURKEY", seed=3)
    file = tmp_path / "game.json"
    play_two_phases(game, file)
    again = open_game(read_game(file), bots, file)
    assert saved(again) == saved(game) and again.pending == game.pending and again.board.phase == "F1901M"
    order(game, "TURKEY")
    order(again, "TURKEY")
    assert again.turns[-1].orders == game.turns[-1].orders, "with the dice of the game that was not interrupted"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda game: game["turns"][0]["orders"].update(FRANCE=["A PAR - MOS"]),
            "was changed: A PAR - MOS is no legal order set",
        ),
        (lambda game: game["turns"][0]["orders"].pop("ITALY"), "was changed: it lacks orders in S1901M"),
        (lambda game: game["given"].update(ITALY=["A ROM H"]), "was changed: ITALY cannot give its orders"),
        (lambda game: game.update(format="entente game 9"), "is not a game of this program: format"),
    ],
)
def test_a_file_that_was_changed_is_refused_in_a_sentence(new_game, bots, tmp_path, change, said):
    file = tmp_path / "game.json"
    play_two_phases(new_game("FRANCE", "TURKEY"), file)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(InputError, match=said):
        open_game(read_game(file), bots, file)


def test_a_game_ends_after_its_years_also_when_it_is_opened_again(new_game, bots, tmp_path):
    game, file = new_game("FRANCE", years=1), tmp_path / "game.json"
    kept = GameFile(file)
    game.keep = lambda: kept.write(game)
    while not game.is_over:
        order(game, "FRANCE")
    assert {turn.board.year for turn in game.turns} == {1901} and game.board.phase == "S1902M" and not game.waits_for
    for ended in (game, open_game(read_game(file), bots, file)):
        assert as_data(ended)["over"] and ended.years == 1 and ended.last_year == 1901
        with pytest.raises(InputError, match="the game ended in 1901"):
            order(ended, "FRANCE")


def test_what_a_search_tried_is_stored_and_shown_best_first(new_game, bots, tmp_path):
    game, file = new_game("FRANCE"), tmp_path / "game.json"
    kept = GameFile(file)
    game.keep = lambda: kept.write(game)
    low, high = (
        SavedProposal(orders=("A X",), value=value, playouts=4, probability=sure) for value, sure in ((3.0, 0.5), (4.0, None))
    )
    bots.proposals = (low, high)
    order(game, "FRANCE")
    again = open_game(read_game(file), bots, file)
    assert again.turns[0].proposals == game.turns[0].proposals and "FRANCE" not in game.turns[0].proposals
    shown = as_data(again)["phases"][0]["tried"][POWERS.index("ITALY")]
    assert [(each["value"], each["sure"], each["playouts"]) for each in shown] == [(4.0, None, 4), (3.0, 0.5, 4)]


def test_a_game_of_searches_with_the_most_proposals_can_be_opened_again_after_years(new_game, bots, tmp_path):
    game, file = new_game("FRANCE"), tmp_path / "game.json"
    tried = SavedProposal(orders=("F STP/SC S A MOS - LVN",) * 17, value=3.0, playouts=8)
    bots.proposals = (tried,) * MOST_PROPOSALS
    while len(game.turns) < 8:
        order(game, "FRANCE")
    asyncio.run(GameFile(file).write(game))
    assert file.stat().st_size > 4 << 20
    assert len(read_game(file).turns) == len(game.turns)
