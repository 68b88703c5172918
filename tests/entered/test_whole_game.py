"""A whole game on the real server, against programs that use the package's own client, with a kill of each side."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from entente.game.server_client import ServerGame
from storage.played_games import read_game
from tests.command import Entente
from tests.entered.server_process import ROOT, ServerProcess

GAMES = ("friday", "sunday")
OTHERS = {"anna": "AUSTRIA", "ewan": "ENGLAND", "gina": "GERMANY", "ivo": "ITALY", "rosa": "RUSSIA", "theo": "TURKEY"}


@pytest.fixture
def others(server: ServerProcess) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts the other accounts, which play in all games."""
    started: list[subprocess.Popen[str]] = []

    def start() -> subprocess.Popen[str]:
        words = [str(server.port), ",".join(GAMES), "1905", *(f"{name}:{power}" for name, power in OTHERS.items())]
        started.append(subprocess.Popen([sys.executable, "-m", "tests.entered.package_clients", *words], cwd=ROOT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def wait_for(server: ServerProcess, is_there: Callable[[ServerGame], bool]) -> None:
    """Wait until each game is there."""
    until = time.monotonic() + 240
    while not all(is_there(server.game(game)) for game in GAMES):
        assert time.monotonic() < until, [server.game(game) for game in GAMES]
        time.sleep(0.1)


@pytest.mark.in_turn
@pytest.mark.system
def test_games_are_played_to_their_end_through_a_kill_of_each_side(server, others, entente: Entente):
    for game in GAMES:
        server.make_game(game)
    words = ["enter", server.address, "--game", ",".join(GAMES), "--power", "france", "--player", "random"]
    words += ["--draw-after", "1905"]
    secrets = {"ENTENTE_ACCOUNT": "ours", "ENTENTE_PASSWORD": "hush-hush"}

    first = entente.start(*words, **secrets)
    rivals = others()
    wait_for(server, lambda game: game.phase != "S1901M")
    time.sleep(1.5)  # the server saves every second
    server.kill()
    rivals.kill()  # the package's client breaks where a server goes back to an earlier phase
    server.start()
    rivals = others()
    stopped = {game: server.game(game).phase for game in GAMES}
    assert all(phase != "S1901M" for phase in stopped.values())
    wait_for(server, lambda game: game.phase != stopped[game.game])
    first.kill()
    said = first.communicate()[0]
    assert "trying again in 1 s" in said

    second = entente.start(*words, **secrets)
    said, errors = second.communicate(timeout=300)
    assert second.returncode == 0, errors
    assert all(f"game '{game}' is over: FRANCE has" in said for game in GAMES)
    assert rivals.wait(timeout=60) == 0
    files = sorted((entente.folder / "runs" / "_games").glob("*.json"))
    assert len(files) == 2
    for file in files:
        game = read_game(file)
        others = {player for power, player in game.seats.items() if power != "FRANCE"}
        assert others == {f"{name}@{server.address}" for name in OTHERS}
        assert game.turns[-1].phase[1:5] in ("1905", "1906")
        assert "hush" not in file.read_text() and "ours" not in file.read_text()
    assert not any("hush" in path.read_text(errors="ignore") for path in entente.folder.rglob("*.json"))
    assert json.loads(files[0].read_text())["seats"]["TURKEY"] == f"theo@{server.address}"
