"""A match from the command line: two versions of a real run and a scripted player, broken off and gone on with."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from entente.evaluation.score_files import write_score
from entente.evaluation.settings import EvaluationSettings, MatchSettings, PlaySettings
from entente.evaluation.strength import Gain
from entente.game.snapshot import Snapshot
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from flows.evaluate_policy import evaluate_policy
from flows.play_match import play_match_of
from state_cache.store import StateCache
from tests.made_scores import made_record, made_score

PUBLISHED = Path(__file__).parents[2] / "models" / "whole-192"
MATCH = MatchSettings(players=("mover", "random"))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[MatchSettings]:
    """The matches that were played, also from the command line."""
    matches = []

    async def play(run: str, runs_root: Path, match: MatchSettings) -> dict[str, Any]:
        matches.append(match)
        return {}

    monkeypatch.setattr("flows.evaluate_policy.play_match_of", play)
    monkeypatch.setattr("entente.cli.evaluate.run_flow", lambda begin: asyncio.run(begin()))
    monkeypatch.setattr("entente.cli.evaluate._show_match", lambda result: None)
    monkeypatch.setattr("flows.evaluate_policy.evaluate_policy", evaluate_policy.fn)
    return matches


def test_a_match_refuses_settings_of_a_score_but_those_that_prefect_s_form_fills_in(played: list[MatchSettings]):
    refused: tuple[dict[str, Any], ...] = {"play": PlaySettings(temperature=0.5)}, {"evaluation": EvaluationSettings(positions=3)}
    for changed in refused:
        with pytest.raises(InputError, match="evaluation and play belong to the score"):
            asyncio.run(evaluate_policy.fn("", match=MATCH, **changed))
    filled_in: dict[str, Any] = {"play": PlaySettings(), "evaluation": EvaluationSettings()}
    for unchanged in ({}, filled_in):
        asyncio.run(evaluate_policy.fn("", match=MATCH, **unchanged))
    assert played == [MATCH] * 2


@pytest.mark.parametrize("is_lost", [False, True], ids=["same", "built again"])
def test_a_score_from_other_positions_than_the_run_s_own_scores_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positions: list[Snapshot], is_lost: bool
):
    settings = layered_settings("laptop", (), {"runs_root": tmp_path, "run": "mine"})
    settings.paths.create().settings.write_text(settings.model_dump_json())
    held_out = tuple(positions)
    gain = Gain(snapshot_id=held_out[0].snapshot_id, game_id="", power="FRANCE", centres=1.0)
    score, asked = made_score(gains=(gain,)), EvaluationSettings(positions=1, opponents=("random",))
    write_score(settings.paths, made_record("base", score, settings=asked))

    @asynccontextmanager
    async def opened(*_: Any) -> AsyncIterator[Any]:
        yield SimpleNamespace(host=None, deciders={"v0": None})

    found = StateCache(path=tmp_path, settings=settings.cache, train=(), held_out=held_out[is_lost:])
    monkeypatch.setattr("flows.evaluate_policy.open_players", opened)
    for name, value in {"prepare_cache": found, "evaluate_player": score, "show_sentences": None}.items():
        monkeypatch.setattr(f"flows.evaluate_policy.{name}", AsyncMock(return_value=value))
    notes = asyncio.run(evaluate_policy.fn("mine", 0, tmp_path, asked))["notes"]
    assert any("from other held-out positions" in note for note in notes) == is_lost, notes


def test_the_command_line_s_play_is_that_of_the_match(entente, played: list[MatchSettings]):
    done = entente("evaluate", "--players", f"{PUBLISHED},random", "--years", "1", "--temperature", "0.5")
    assert done.returncode == 0 and [match.temperature for match in played] == [0.5], done.stderr


NO_POLICY = "would have no effect, because no player is a version or a model"
NO_SEARCH = "--search settings are given, but no player searches"


@pytest.mark.parametrize(
    ("settings", "words", "sentence"),
    [
        ({"temperature": 0.5}, ("--temperature", "0.5"), f"--temperature {NO_POLICY}"),
        ({"strategy": "search"}, ("--strategy", "search"), f"--strategy {NO_POLICY}"),
        ({"search": {"playouts": 4}}, ("--search.playouts", "4"), NO_SEARCH),
    ],
    ids=["temperature", "strategy", "search"],
)
@pytest.mark.parametrize(
    "players", [("mover", "random"), ("mover", "openai:some@http://127.0.0.1:9/v1")], ids=["scripted", "endpoint"]
)
def test_settings_that_no_player_of_a_match_uses_are_refused(
    entente, tmp_path: Path, players: tuple[str, ...], settings: dict[str, Any], words: tuple[str, ...], sentence: str
):
    match = MatchSettings.model_validate({"players": players, "years": 1, **settings})
    with pytest.raises(InputError, match=sentence):
        asyncio.run(play_match_of("", tmp_path, match))
    done = entente("evaluate", "--players", ",".join(players), "--years", "1", *words)
    assert (done.returncode, done.stdout) == (2, "") and sentence in " ".join(done.stderr.split())


@pytest.mark.parametrize("players", ["dumbbot+search,random", f"{PUBLISHED},random"], ids=["player that searches", "policy"])
def test_a_search_that_some_player_uses_is_accepted(entente, played: list[MatchSettings], players: str):
    strategy = () if "+search" in players else ("--strategy", "search")
    done = entente("evaluate", "--players", players, "--years", "1", "--search.playouts", "4", *strategy)
    assert done.returncode == 0 and [match.search.playouts for match in played] == [4], done.stderr


@pytest.mark.in_turn
@pytest.mark.system
def test_a_published_model_meets_versions_of_a_run_and_the_match_is_continued(workplace, trained, model):
    published = workplace("model", "publish", str(model), "--to", "models/small")
    assert published.returncode == 0 and published.stdout == "models/small\n", published.stderr
    players = ("--players", "newest,models/small", "--opponents", "random", "--years", "1", "--json")
    match = ("evaluate", "--run", "first", *players)
    first = workplace.process(*match, "--games", "7")
    assert first.returncode == 0, first.stderr
    assert "because it starts soonest for a model without a run" in first.stderr, "no setting of a user names its engine"
    result = json.loads(first.stdout.splitlines()[-1])
    assert [player["player"] for player in result["players"]] == ["v2", "models/small"]
    assert (result["run"], result["games"], result["rejected"]) == ("first", 14, 0)
    assert result["cpu_seconds_a_game"] > 0 and f"{result['cpu_seconds_a_game']:.3g} CPU seconds per game" in first.stderr
    kept = trained[1].matches / f"{result['match']}.jsonl"
    lines = kept.read_text().splitlines()
    again = json.loads(workplace.process(*match, "--games", "14").stdout.splitlines()[-1])
    assert again["games"] == 28 and kept.read_text().splitlines()[:14] == lines
    fewer = workplace.process(*match, "--games", "7")
    assert "keeps its 28 games" in fewer.stderr and json.loads(fewer.stdout.splitlines()[-1])["cpu_seconds_a_game"] > 0
    assert json.loads(kept.with_suffix(".json").read_text())["table"]["games"] == 28
    card = workplace("model", "publish", str(model), "--to", "models/known", "--results", str(kept.with_suffix(".json")))
    assert card.returncode == 0 and "| models/known |" in (workplace.folder / "models" / "known" / "README.md").read_text()


@pytest.mark.in_turn
@pytest.mark.system
def test_a_version_is_scored_with_a_search(workplace, trained):
    quick = ("--search.proposals", "2", "--search.playouts", "4", "--search.player", "random", "--positions", "2")
    done = workplace.process("evaluate", "--run", "first", "--opponents", "random", "--strategy", "search", *quick, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["how"].startswith("search of versions: 2 proposals and dumbbot, dumbbot, dumbbot, 4 playouts")
    assert result["orders_rejected"] == 0 and result["against"]["random"]["forks"] == 4, "two positions, two powers of each"
