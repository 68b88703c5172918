"""Endpoints as players from the command line: a match, and a run that trains against one."""

import json

import pytest

from storage.runs import RunPaths
from tests.players.endpoint_server import EndpointServer, plays

pytestmark = pytest.mark.system


@pytest.mark.in_turn
def test_a_match_against_an_endpoint_is_continued_without_it(entente, prefect_server):
    with EndpointServer(plays) as server:
        match = ("evaluate", "--players", f"{server.player},random", "--opponents", "hold", "--years", "1", "--json")
        first = entente.process(*match, "--games", "7", PREFECT_API_URL=prefect_server)
        assert first.returncode == 0, first.stderr
    result = json.loads(first.stdout.splitlines()[-1])
    assert result["answers"][server.player]["answers"] == len(server.requests) >= 14
    assert f"{server.player}: asked for" in first.stdout and result["rejected"] == 0
    kept = entente.folder / "runs" / "_matches" / f"{result['match']}.jsonl"
    kept.unlink()
    again = entente.process(*match, "--games", "7", PREFECT_API_URL=prefect_server)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout.splitlines()[-1])["players"] == result["players"]


@pytest.mark.in_turn
def test_a_run_trains_against_an_endpoint_and_its_key_is_in_no_file(workplace):
    with EndpointServer(plays) as server:
        key = {f"ENTENTE_KEY_127_0_0_1_{server.server_port}": "sk-very-secret"}
        words = ("--config", "small.toml", "--run", "outside", "--steps", "1")
        done = workplace.process("train", *words, "--rollouts.opponents", server.player, **key)
        assert done.returncode == 0, done.stderr
    paths = RunPaths(workplace.folder / "runs" / "outside")
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    (figures,) = [line for line in lines if "rollout/endpoint_decisions" in line]
    answers = [json.loads(line) for line in paths.answers.read_text().splitlines()]
    assert figures["rollout/endpoint_decisions"] >= len(answers) == len(server.requests) > 0
    assert figures["rollout/endpoint_missing_share"] == 0
    asked = workplace("sql", "--run", "outside", "SELECT DISTINCT opponents FROM decisions")
    assert server.player in asked.stdout, asked.stderr
    assert all(request["headers"]["authorization"] == "Bearer sk-very-secret" for request in server.requests)
    files = [file for file in paths.root.rglob("*") if file.is_file()]
    assert len(files) > 10 and not any(b"sk-very-secret" in file.read_bytes() for file in files)
    assert "sk-very-secret" not in done.stdout + done.stderr
    replayed = workplace("runs", "replay-step", "--step", "1", "--run", "outside")
    assert replayed.returncode == 0, "the endpoint is off\n" + replayed.stderr
