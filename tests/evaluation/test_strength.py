"""Strength is measured in the same way for all players, and its interval treats a source game as one cluster."""

import asyncio
import math
import os
from dataclasses import replace

import numpy as np
import pytest

from entente.evaluation.score_files import read_score, read_scores, write_score
from entente.evaluation.settings import SCORE_SEED, EvaluationSettings
from entente.evaluation.strength import POLICY, measure_strength
from entente.game.board import Board
from entente.game.scripted import player
from entente.players.policy import DecisionRequest, PolicyPlayer
from entente.players.seeds import seeded_rng
from entente.telemetry.errors import DataError, EngineError, InputError
from storage.runs import RunPaths
from tests.made_scores import made_record

SETTINGS = EvaluationSettings(positions=8)


def score(who: str, positions, engine=None, tokens=None, opponents: str = "random"):
    return asyncio.run(measure_strength(who, opponents, positions, SETTINGS, PolicyPlayer(engine, tokens) if engine else None))


def test_the_score_of_a_scripted_player_is_what_playing_it_out_gains(positions):
    """Oracle: a loop over boards without forks and plans."""
    gains = []
    for snapshot in positions:
        able = sorted(
            seeded_rng("evaluation-powers", SCORE_SEED, snapshot.snapshot_id).sample(
                list(Board.restore(snapshot).legal_orders()), 2
            )
        )
        for power in able:
            board, name = (
                Board.restore(snapshot),
                f"evaluation/{SCORE_SEED}/{snapshot.snapshot_id}/{power}",
            )
            year, start = board.year, len(board.centres()[power])
            while board.phase < f"S{year + 1}M" if board.phase[0] == "S" else board.year == year:
                orders = {
                    seat: player("mover" if seat == power else "random")(legal, seeded_rng(name, board.phase, seat))
                    for seat, legal in board.legal_orders().items()
                }
                board.step(orders)
                if board.year > year:
                    break
            gains.append(len(board.centres()[power]) - start)
    if any(snapshot.season != "S" for snapshot in positions):
        pytest.fail("the fixture's positions are spring positions")
    found = score("mover", positions)
    assert found.mean == pytest.approx(np.mean(gains)) and sorted(each.centres for each in found.gains) == sorted(gains)
    games = {snapshot.snapshot_id: snapshot.game_id for snapshot in positions}
    assert all(games[each.snapshot_id] == each.game_id for each in found.gains)
    assert len({(each.snapshot_id, each.power) for each in found.gains}) == 16


def test_every_player_meets_the_same_opponents_dice(uniform_engine, tokens, positions):
    """The policy and 'random' are scored with equal numbers of forks, positions and source games."""
    policy, random = score(POLICY, positions, uniform_engine(), tokens), score("random", positions)
    assert (
        (policy.forks, policy.positions, policy.source_games)
        == (random.forks, random.positions, random.source_games)
        == (16, 8, 8)
    )
    assert policy.orders_rejected == 0


class Holds:
    """Decides what the scripted player 'hold' would, under whatever name it sits."""

    async def decide(self, request: DecisionRequest) -> list[str]:
        return list(player("hold")(request.legal, seeded_rng(request.game), request.board))


def test_players_that_decide_alike_score_alike(positions):
    """What others roll hangs on the position and the seat, not on who is scored."""
    decided = asyncio.run(measure_strength("v1", "random", positions, SETTINGS, decider=Holds()))
    assert decided == score("hold", positions) and decided != score("mover", positions)


@pytest.mark.parametrize("games", [1, 2, 5])
def test_positions_of_too_few_games_have_a_score_and_no_interval(positions, games: int):
    """All positions of one source game are one cluster."""
    some = [replace(each, game_id=f"game {place % games}") for place, each in enumerate(positions)]
    found = score("mover", some)
    assert (found.positions, found.source_games, found.low, found.high) == (8, games, None, None)
    assert math.isfinite(found.mean) and found.estimate.rounded() is None


def test_too_few_held_out_positions_are_refused(positions):
    with pytest.raises(InputError, match=r"evaluation\.positions is 8, but the state cache holds 3 held-out"):
        score("random", positions[:3])


def test_a_failed_fork_is_no_score(uniform_engine, tokens, positions):
    with pytest.raises(EngineError, match="failed on position"):
        score(POLICY, positions, uniform_engine(fails=lambda request: True), tokens)


def test_an_opening_says_how_sure_the_policy_was_of_each_order(uniform_engine, tokens, positions):
    """The engine draws legal tokens uniformly, so the probability of the order set is known."""
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
    kept = made_record("base", score(POLICY, positions, uniform_engine(), tokens), settings=SETTINGS)
    write_score(paths, kept)
    assert read_score(paths, "base") == kept and read_scores(paths) == {"base": kept}
    assert read_score(paths, "trained") is None
    for label, who, version in (("random", "random", 0), ("trained", POLICY, 10), ("track/v000005", POLICY, 5)):
        write_score(paths, replace(kept, label=label, player=who, policy_version=version))
    os.utime(paths.scores / "base.json")  # a copy of a run has other file times
    assert list(read_scores(paths, track=True)) == ["base", "track/v000005", "trained", "random"]
    (paths.scores / "base.json").write_text("{")
    with pytest.raises(DataError, match=r"base.json is not a score"):
        read_score(paths, "base")
