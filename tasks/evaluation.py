"""The evaluation tasks: one player against one kind of opponents on the held-out positions; the games of a match."""

from collections.abc import Mapping, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from evaluation.matches import GamePlan, GameResult, OnGame, play_match
from evaluation.settings import EvaluationSettings, MatchSettings
from evaluation.strength import POLICY, Score, measure_strength
from evaluation.tactics import TacticalPosition, TacticsScore, solve
from game.snapshot import Snapshot
from inference.engine import Engine
from inference.host import EngineHost
from rollouts.deciders import Decider, Tokens
from telemetry.progress import reporter


@task(
    name="evaluate",
    task_run_name="evaluate-{label}-vs-{opponents}",
    cache_policy=NO_CACHE,
    persist_result=False,
    tags=["evaluate"],
)
async def evaluate_player(
    label: str,
    player: str,
    opponents: str,
    positions: Sequence[Snapshot],
    settings: EvaluationSettings,
    host: EngineHost,
    engine: Engine | None,
    tokens: Tokens | None,
    decider: Decider | None = None,
) -> Score:
    """Score `player` (the policy as the engine serves it, a scripted one, or `decider`), called `label` in the run's names."""
    who = f"{label} against {opponents}"
    policy = player == POLICY
    return await host.run(
        measure_strength(
            player,
            opponents,
            positions,
            settings,
            engine if policy else None,
            tokens if policy else None,
            lambda done, total: reporter().stage(f"evaluating {who}", done, total),
            decider,
        )
    )


@task(name="play-match", task_run_name="play-match-{label}", cache_policy=NO_CACHE, persist_result=False, tags=["evaluate"])
async def play_games(
    host: EngineHost,
    label: str,
    plans: Sequence[GamePlan],
    settings: MatchSettings,
    deciders: Mapping[str, Decider],
    on_game: OnGame,
) -> list[GameResult]:
    """Play the games of a match that are still to be played; each is told as it ends."""
    done = 0

    def told(game: GameResult) -> None:
        nonlocal done
        done += 1
        on_game(game)
        reporter().stage("playing games", done, len(plans))

    return await host.run(play_match(plans, settings, deciders, told))


@task(name="solve-tactics", task_run_name="solve-tactics-{name}", cache_policy=NO_CACHE, persist_result=False, tags=["evaluate"])
async def solve_positions(
    host: EngineHost, name: str, version: int, positions: Sequence[TacticalPosition], decider: Decider | None
) -> TacticsScore:
    """What a player solves of the tactical positions: `decider`, or the scripted player of this name."""

    def told(done: int, total: int) -> None:
        reporter().stage(f"tactical positions, {name}", done, total)

    return await host.run(solve(name, version, positions, decider, on_position=told))
