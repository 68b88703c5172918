"""Figures of benchmarks are of what they say, whatever the clock shows."""

import json
import math
import random

import pytest

from benchmarks import cache_shelf, game_ground
from benchmarks.cache_shelf import bench_cache
from benchmarks.game_ground import bench_game, played_games
from benchmarks.outcome import Outcome, Target, median_ms
from cli import main
from game.board import Board
from game.plain import PlainGame
from state_cache.build import play_source_game
from state_cache.settings import CacheSettings
from telemetry.errors import EngineError, InputError


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
    step, dice = Board.step, random.Random(1)

    def careless(board: Board, orders: dict) -> object:
        return step(board, {power: given for power, given in orders.items() if dice.random() < 0.8})

    games = played_games(phases=20, seed=0)
    monkeypatch.setattr(game_ground, "played_games", lambda phases, seed: games)
    monkeypatch.setattr(Board, "step", careless)
    with pytest.raises(EngineError, match="led to another position"):
        bench_game(phases=20, rounds=1)


def test_bytes_are_those_of_the_positions_and_times_are_per_thousand(monkeypatch: pytest.MonkeyPatch):
    settings = CacheSettings(train_snapshots=18, held_out_snapshots=2, first_year=1902, last_year=1907, seed=5)
    monkeypatch.setattr(cache_shelf, "cpu_seconds", lambda work: (work(), 2.0)[1])
    metrics = bench_cache(positions=20, rounds=1, seed=5).metrics
    sizes = [len(snapshot.position) for game in range(8) for snapshot in play_source_game(game, settings)]
    assert min(sizes) < metrics["bytes_per_snapshot"] < max(sizes)
    assert metrics["bytes_per_snapshot"] < metrics["disk_bytes_per_snapshot"]
    assert (metrics["positions"], metrics["build_cpu_s"]) == (20, 2.0 * 1000 / 20)


def test_time_counts_the_work_and_not_the_waiting(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 0.004, 1.0, 1.002, 2.0, 2.012])
    monkeypatch.setattr("benchmarks.outcome.time.process_time", lambda: next(clock))
    done: list[None] = []
    assert median_ms(lambda: done.append(None), rounds=3, calls=2) == pytest.approx(2.0)
    assert len(done) == 6


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


@pytest.mark.parametrize("bench", [lambda: bench_game(phases=0), lambda: bench_cache(positions=4)], ids=["game", "cache"])
def test_nothing_to_measure_is_the_users_mistake(bench):
    with pytest.raises(InputError, match="nothing to measure"):
        bench()


@pytest.mark.parametrize("words", [["game", "--phases", "10"], ["cache", "--positions", "10"]], ids=["game", "cache"])
def test_the_last_line_is_one_object_and_a_missed_target_no_failure(words, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Target, "holds", lambda target, value: False)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", *words, "--rounds", "1", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    told = json.loads(last)
    assert set(told) == {"benchmark", "metrics", "targets", "scaled_down", "ok", "machine"} and told["benchmark"] == words[0]
    assert told["ok"] is False and set(told["targets"]) <= set(told["metrics"]) and told["machine"]["diplomacy"]
    assert all(any(line.startswith(name) for line in table) for name in told["metrics"])
    scaled_down = {"game": set(), "cache": {"build_cpu_s", "load_ms"}}[words[0]]
    assert set(told["scaled_down"]) == scaled_down
    assert sum("scaled down" in line for line in table) == len(scaled_down)
    assert sum("missed" in line for line in table) == len(told["targets"]) - len(scaled_down)


def test_an_outcome_is_ok_only_if_every_target_of_a_full_size_figure_holds():
    def outcome(**metrics: float) -> Outcome:
        targets = {"a": Target(at_most=1.0), "b": Target(at_least=2.0), "c": Target(at_least=2.0)}
        return Outcome(benchmark="any", metrics={"c": 1.0} | metrics, targets=targets, scaled_down=["c"])

    assert outcome(a=1.0, b=2.0).ok
    assert not outcome(a=1.0, b=1.0).ok and not outcome(a=2.0, b=2.0).ok


def test_the_speedup_is_of_the_fast_path_over_the_engine_s_public_calls(monkeypatch: pytest.MonkeyPatch):
    """With a clock that makes every phase of a plain board ten times as long as one of a fast board."""
    now, step = 0.0, Board.step

    def timed(board: Board, orders: dict) -> object:
        nonlocal now
        now += 10.0 if isinstance(board._game, PlainGame) else 1.0
        return step(board, orders)

    monkeypatch.setattr(Board, "step", timed)
    monkeypatch.setattr("benchmarks.outcome.time.process_time", lambda: now)
    monkeypatch.setattr(game_ground, "median_ms", lambda work, **how: 1.0)
    metrics = bench_game(phases=20, rounds=2).metrics
    assert (metrics["speedup"], metrics["phases_per_s"], metrics["plain_phases_per_s"]) == (10.0, 1.0, 0.1)
