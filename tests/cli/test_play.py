"""`entente play` without its page: which game is opened, and what the command says about one that goes on."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from entente.cli import play as play_module
from entente.cli.play import play
from entente.live_games import http_server
from entente.telemetry.errors import InputError


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    async def serve(server: object, listener: object, *, on_ready: Callable[[], None]) -> None:
        on_ready()

    monkeypatch.setattr(http_server, "serve", serve)
    monkeypatch.setattr("flows.open_players.usable_cores", lambda: 1)  # no processes, which take seconds to start

    def open_game(**options: Any) -> str:
        play(game="evening", browser=False, runs_root=tmp_path, **options)
        return capsys.readouterr().out

    return open_game


def test_a_game_that_another_command_began_and_left_meanwhile_is_not_overwritten(opened, tmp_path: Path, monkeypatch):
    opened(power="italy")
    (tmp_path / "_games" / "evening.json").rename(tmp_path / "begun.json")

    def resolved(*arguments: Any) -> Any:  # takes seconds: the time between the first look at the file and the lock
        if (tmp_path / "begun.json").exists():
            (tmp_path / "begun.json").rename(tmp_path / "_games" / "evening.json")
        return resolve(*arguments)

    resolve = play_module._resolved
    monkeypatch.setattr(play_module, "_resolved", resolved)
    assert "people: Italy" in opened(power="france")
    assert json.loads((tmp_path / "_games" / "evening.json").read_text())["seats"]["ITALY"] == "human"


def test_a_game_that_goes_on_says_who_plays_whatever_the_options_say(opened, tmp_path: Path):
    assert "goes on" not in opened(power="italy,turkey", against="territorial", years=2)
    stored = (tmp_path / "_games" / "evening.json").read_text()
    said = opened(power="france", against="mover", years=9, seed=3)
    assert "(people: Italy, Turkey; other players: territorial; to the end of 1902)" in said
    assert "Temperature and search are not stored: this command's apply." in said
    assert json.loads(stored)["years"] == 2 and (tmp_path / "_games" / "evening.json").read_text() == stored


def test_code_that_a_game_file_names_runs_only_if_the_command_names_it_too(opened, tmp_path: Path, monkeypatch):
    (tmp_path / "bot.py").write_text("def hold(legal, rng, board): return [f'{unit} H' for unit in legal.sites]")
    monkeypatch.syspath_prepend(tmp_path)
    opened(power="italy")
    file = tmp_path / "_games" / "evening.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"seats": stored["seats"] | {"FRANCE": "bot:hold"}}))
    with pytest.raises(InputError, match=r"'bot:hold' of game '.*' is code of this machine"):
        opened()
    assert "bot" not in sys.modules
    assert "other players: bot:hold, dumbbot" in opened(against="bot:hold")
