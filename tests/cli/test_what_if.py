"""`entente runs what-if`: the answer as table and data, for games of runs and of people; and what is refused, in a sentence."""

import json
import shutil

import pytest

from entente.game.board import POWERS, Board
from entente.game.scripted import player
from entente.players.seeds import seeded_rng
from storage.played_games import HUMAN, SavedGame, SavedTurn
from storage.runs import RunPaths
from tests.command import Entente

GAME = "--game", "2/0", "--run", "before", "--phase", "S1902M"


@pytest.fixture
def ask(stored_run: RunPaths) -> Entente:
    """The command beside the stored run and a played game of one year."""
    folder = stored_run.root.parent
    board, turns = Board.start(), []
    while board.year == 1901:
        legal = board.legal_orders()
        orders = {power: tuple(player("dumbbot")(legal[power], seeded_rng("game", board.phase, power), board)) for power in legal}
        turns.append(SavedTurn(phase=board.phase, orders=orders))
        board.step(orders)
    seats = dict.fromkeys(POWERS, "dumbbot") | {"FRANCE": HUMAN}
    (folder / "_games").mkdir()
    saved = SavedGame(name="evening", seats=seats, turns=tuple(turns)).model_dump_json()
    (folder / "_games" / "evening.json").write_text(saved)
    (folder / "_games" / "damaged.json").write_text(saved.replace("A MAR", "A MOS"))
    return Entente(folder)


def answer(ask: Entente, *words: str) -> dict:
    done = ask("runs", "what-if", *words, "--runs-root", ".", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_run_s_game_goes_on_with_other_orders(ask: Entente):
    found = answer(ask, *GAME, "--orders", "A MAR-BUR, A PAR S A MAR-BUR, F GAS - SPA/NC", "--forks", "8")
    assert found["power"] == "FRANCE" and found["changed"] == {"FRANCE": ["F GAS - SPA/NC", "A MAR - BUR", "A PAR S A MAR - BUR"]}
    gains = [changed - played for played, changed in found["pairs"]]
    assert found["difference"]["mean"] == sum(gains) / 8 and len(found["difference"]["interval"]) == 2


def test_a_played_game_goes_on_with_another_player_s_orders(ask: Entente):
    words = "--phase", "F1901M", "--power", "france", "--version", "hold", "--forks", "6", "--players", "hold"
    found = answer(ask, "--game", "evening", *words)
    assert found["difference"]["mean"] < 0 and found["version"] == "hold", "dumbbot took a centre, and who holds does not"
    assert answer(ask, "--game", "_games/evening.json", *words) == found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--game", "damaged", "--phase", "S1901M"], "game file '_games/damaged.json' was changed"),
        (["--game", "evening", "--phase", "S1905M"], "game evening has no phase 'S1905M': its phases with orders are S1901M"),
        ([*GAME, "--orders", "A PAR - MOS"], "'A PAR - MOS' is no legal order of FRANCE in S1902M"),
        ([*GAME, "--orders", "A PAR H", "--version", "base"], "--orders and --version both set the orders"),
        ([*GAME, "--version", "hold", "--temperature", "0.5"], "--temperature would have no effect, because no player is a"),
        (
            [*GAME, "--power", "france", "--version", "v1"],
            "has no policy version 1 any more: it was retired; the run keeps base, v2",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(ask: Entente, words: list[str], sentence: str):
    shutil.rmtree(ask.folder / "before" / "adapters" / "v000001")
    done = ask("runs", "what-if", *words, "--runs-root", ".")
    assert done.returncode == 2 and sentence in done.stderr and not done.stdout


def test_without_a_phase_and_a_power_it_asks_about_the_first_movements_of_the_power_with_most_units(ask: Entente):
    found = answer(ask, "--game", "evening", "--version", "hold", "--forks", "2", "--players", "hold")
    assert found["power"] == "RUSSIA" and "S1901M" in found["change"]
