"""Figures of benchmarks are of what they say, whatever the clock shows."""

import json
import math
import random
from pathlib import Path

import pytest

from benchmarks import game_ground
from benchmarks.game_ground import bench_game, played_games
from benchmarks.outcome import Target
from benchmarks.storage_figures import bench_storage
from entente.cli import bench, main
from entente.game.board import Board
from entente.telemetry.errors import EngineError, InputError


def test_the_game_that_is_measured_is_played_as_noted():
    """By hand, on a board of its own: as many phases, every order legal, the same end."""
    games = played_games(phases=30, seed=3)
    for notes, end in games:
        board = Board.start()
        for orders in notes:
            assert sum(board.step(orders).rejected.values()) == 0
        assert end.startswith(board.phase) and end.endswith(board.snapshot(game_id="", seed=0, source="").position)
        assert board.year > game_ground.LAST_YEAR
    outcome = bench_game(phases=30, rounds=1, seed=3)
    assert outcome.metrics["phases"] == sum(len(notes) for notes, _ in games) >= 30
    assert outcome.metrics["games"] == len(games)
    assert {"speedup", "plain_phases_per_s", "fork_vs_deepcopy"} <= set(outcome.metrics)
    assert outcome.metrics["fork_ms"] > 0 and outcome.metrics["restore_ms"] > 0 and outcome.metrics["phases_per_s"] > 0


def test_a_path_that_plays_otherwise_gives_no_figure(monkeypatch: pytest.MonkeyPatch):
    step, rng = Board.step, random.Random(1)

    def careless(board: Board, orders: dict) -> object:
        return step(board, {power: given for power, given in orders.items() if rng.random() < 0.8})

    games = played_games(phases=20, seed=0)
    monkeypatch.setattr(game_ground, "played_games", lambda phases, seed: games)
    monkeypatch.setattr(Board, "step", careless)
    with pytest.raises(EngineError, match="led to another position"):
        bench_game(phases=20, rounds=1)


@pytest.mark.parametrize(
    ("target", "holds", "misses"),
    [
        (Target(at_least=3.0), [3.0, 4.0], [2.999, math.nan]),
        (Target(at_most=0.1), [0.1, 0.0], [0.1001, math.nan]),
        (Target(at_least=1.0, at_most=2.0), [1.0, 2.0], [0.5, 2.5]),
    ],
    ids=str,
)
def test_a_target_holds_up_to_its_bound(target: Target, holds: list[float], misses: list[float]):
    assert all(target.holds(value) for value in holds) and not any(target.holds(value) for value in misses)


@pytest.mark.parametrize("scale", [0.001, 2.0])
def test_nothing_to_measure_is_the_users_mistake(scale: float):
    with pytest.raises(InputError, match="nothing to measure"):
        bench_storage(scale=scale)


def test_the_last_line_is_one_object_and_a_missed_target_no_failure(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(bench._BENCHMARKS, "game", lambda rounds: bench_game(phases=10, rounds=rounds))
    monkeypatch.setattr(Target, "holds", lambda target, value: False)
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "game", "--seed", "1"]) == 2 and "has no use for --seed" in capsys.readouterr().err
    assert main.run(["bench", "game", "--rounds", "1", "--json"]) == 0
    shown = capsys.readouterr()
    table, outcome = shown.err.splitlines(), json.loads(shown.out)
    assert set(outcome) == {"benchmark", "metrics", "targets", "ok", "machine"} and outcome["benchmark"] == "game"
    assert outcome["ok"] is False and set(outcome["targets"]) <= set(outcome["metrics"]) and outcome["machine"]["diplomacy"]
    assert all(any(line.startswith(name) for line in table) for name in outcome["metrics"])
    assert sum("missed" in line for line in table) == len(outcome["targets"])


def test_a_benchmark_has_the_seed_of_its_config_unless_a_flag_names_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("entente.cli.bench.apply_threads", lambda count: None)
    measured: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "benchmarks.entente_run.bench_e2e", lambda settings, **how: measured.append((settings.seed, how["steps"]))
    )
    (tmp_path / "mine.toml").write_text("seed = 7\n")
    bench._e2e(config=[tmp_path / "mine.toml"])
    bench._e2e(config=[tmp_path / "mine.toml"], seed=3)
    bench._e2e()
    assert measured == [(7, 20), (3, 20), (0, 20)]
