"""How many games to play at once: decisions a second of the policy by the number of concurrent games, on the machine at hand.

Whole games of the tiny model, or of a model in a folder, in one seat against scripted players: what `entente evaluate` plays.
Each number plays the same games, once through for what is lazy and then for the clock, so the figures differ in nothing but how
many requests the engine meets at a time. The best is the smallest number within a twentieth of the most decisions a second.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.outcome import Outcome
from decoding.codec import Codec
from evaluation.matches import plan_match, play_match
from evaluation.settings import MatchSettings
from inference.choose_engine import choose_engine
from inference.host import EngineHost
from inference.settings import InferenceSettings
from rollouts.deciders import PolicyDecider, Question, Tokens
from telemetry.progress import reporter

SWEPT = (1, 2, 4, 8, 16, 32, 64, 128)
_NEAR = 0.95


class _Counted(PolicyDecider):
    """Counts its decisions."""

    count = 0

    async def decide(self, question: Question) -> list[str]:
        self.count += 1
        return await super().decide(question)


def bench_games(*, games: int, years: int, settings: InferenceSettings, model: Path, swept: Sequence[int] = SWEPT) -> Outcome:
    """Decisions a second for each number of games at once, and the best of them.

    Args:
        games: played for each number, in whole rounds of seven.
    """
    host, engine = EngineHost("bench-games"), choose_engine(settings, model)
    try:
        host.submit(engine.start()).result(timeout=settings.start_timeout_s)
        decider = _Counted(engine, Tokens(Codec(model)), None)
        speed: dict[int, float] = {}
        for done, number in enumerate(swept, start=1):
            match = MatchSettings(players=("policy version",), opponents="random", years=years, at_once=number)
            plans = plan_match(match, -(-games // 7))
            if done == 1:
                host.submit(play_match(plans[:7], match, {"policy version": decider})).result()
            decider.count, began = 0, time.monotonic()
            host.submit(play_match(plans, match, {"policy version": decider})).result()
            speed[number] = decider.count / (time.monotonic() - began)
            reporter().stage("games at once", done, len(swept))
    finally:
        host.submit(engine.close()).result(timeout=60)
        host.close()
    metrics = {f"at_once_{number}_decisions_per_s": value for number, value in speed.items()}
    return Outcome(benchmark="games", metrics=metrics | summary(speed), targets={})


def summary(speed: dict[int, float]) -> dict[str, float]:
    """The best number of games at once, and what it gains over one at a time."""
    most = max(speed.values())
    best = min(number for number, value in speed.items() if value >= _NEAR * most)
    return {"best_at_once": float(best), "gain_over_one": speed[best] / speed[min(speed)]}
