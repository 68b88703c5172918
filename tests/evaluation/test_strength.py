"""Strength is measured alike for all, and its interval knows that positions of one game are not independent."""

import asyncio
import math

import numpy as np
import pytest

from evaluation.score_files import ScoreRecord, read_score, read_scores, write_score
from evaluation.settings import EvaluationSettings
from evaluation.strength import POLICY, cluster_bootstrap, measure_strength
from game.board import POWERS, Board
from game.players import player
from rollouts.seeds import dice
from storage.runs import RunPaths
from telemetry.errors import DataError, EngineError, InputError

SETTINGS = EvaluationSettings(positions=8, powers_per_position=2, bootstrap=400)


def score(who: str, positions, engine=None, tokens=None, opponents: str = "random"):
    return asyncio.run(measure_strength(who, opponents, positions, SETTINGS, engine, tokens))


def test_the_score_of_a_scripted_player_is_what_playing_it_out_gains(positions):
    """Against a loop over boards that knows nothing of forks and plans."""
    gains = []
    for snapshot in positions:
        able = sorted(
            dice("evaluation-powers", SETTINGS.seed, snapshot.snapshot_id).sample(list(Board.restore(snapshot).legal_orders()), 2)
        )
        for power in able:
            board, name = (
                Board.restore(snapshot),
                f"evaluation/{SETTINGS.seed}/{snapshot.snapshot_id}/{power}",
            )
            year, start = board.year, len(board.centres()[power])
            while board.phase < f"S{year + 1}M" if board.phase[0] == "S" else board.year == year:
                orders = {
                    seat: player("mover" if seat == power else "random")(legal, dice(name, board.phase, seat))
                    for seat, legal in board.legal_orders().items()
                }
                board.step(orders)
                if board.year > year:
                    break
            gains.append(len(board.centres()[power]) - start)
    if any(snapshot.season != "S" for snapshot in positions):
        pytest.fail("the fixture's positions are spring positions")
    assert score("mover", positions).mean == pytest.approx(np.mean(gains))


def test_every_player_meets_the_same_opponents_dice(uniform_engine, tokens, positions):
    """The policy that draws what 'random' would is scored on the same plan: forks, positions and games are equal."""
    policy, random = score(POLICY, positions, uniform_engine(), tokens), score("random", positions)
    assert (
        (policy.forks, policy.positions, policy.source_games)
        == (random.forks, random.positions, random.source_games)
        == (16, 8, 8)
    )
    assert policy.orders_rejected == 0


def test_the_interval_resamples_whole_games():
    """Ten copies of a position carry the information of one: the interval must not shrink."""
    values, clusters = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), np.arange(6)
    low, high = cluster_bootstrap(values, clusters, 4000, 0)
    copied_low, copied_high = cluster_bootstrap(np.repeat(values, 10), np.repeat(clusters, 10), 4000, 0)
    assert copied_high - copied_low == pytest.approx(high - low, abs=0.05)
    naive_low, naive_high = cluster_bootstrap(np.repeat(values, 10), np.arange(60), 4000, 0)
    assert naive_high - naive_low < 0.5 * (high - low)


def test_the_interval_of_a_known_spread():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    low, high = cluster_bootstrap(values, np.arange(400), 4000, 1)
    assert high - low == pytest.approx(2 * 1.96 / 20, rel=0.15) and low < values.mean() < high


def test_too_few_held_out_positions_are_refused(positions):
    with pytest.raises(InputError, match="8 held-out positions are asked for but the state cache holds 3"):
        score("random", positions[:3])


def test_a_failed_fork_is_no_score(uniform_engine, tokens, positions):
    with pytest.raises(EngineError, match="failed on position"):
        score(POLICY, positions, uniform_engine(fails=lambda request: True), tokens)


def test_seats_are_all_seven(uniform_engine, tokens, positions):
    engine = uniform_engine()
    score(POLICY, positions, engine, tokens)
    assert {request.request_id.split("/")[3] for request in engine.requests} <= set(POWERS)


def test_an_opening_says_how_sure_the_policy_was_of_each_order(uniform_engine, tokens, positions):
    """The engine draws every legal token alike, so the whole order set has a probability that is known."""
    openings = score(POLICY, positions, uniform_engine(), tokens).openings
    assert len(openings) == 8
    for opening in openings:
        legal = Board.restore(opening.snapshot).legal_orders()[opening.power]
        table = tokens.tables.table(legal)
        sets = table.legal_sets(tokens.tables.spell(opening.orders, legal))[1]
        assert math.prod(opening.probabilities) == pytest.approx(math.prod(1 / np.diff(sets)), rel=1e-2)
        assert len(opening.probabilities) == len(opening.orders) == legal.picks
    assert score("random", positions).openings == ()


def test_a_score_is_read_back_as_it_was_kept(uniform_engine, tokens, positions, tmp_path):
    paths = RunPaths(tmp_path)
    kept = ScoreRecord(
        label="base",
        player=POLICY,
        opponents="random",
        policy_version=0,
        settings=SETTINGS,
        score=score(POLICY, positions, uniform_engine(), tokens),
    )
    write_score(paths, kept)
    assert read_score(paths, "base") == kept and read_scores(paths) == {"base": kept}
    assert read_score(paths, "trained") is None
    (paths.scores / "base.json").write_text("{")
    with pytest.raises(DataError, match=r"base.json is no score"):
        read_score(paths, "base")
