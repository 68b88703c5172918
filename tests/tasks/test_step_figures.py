"""Figures of a step: counts of one span, and nothing where nobody counted."""

import asyncio
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entente.inference.engine import EngineStats
from entente.players.endpoint import EndpointSettings
from entente.players.endpoint_players import EndpointPlayers
from entente.players.read_answer import AnswerCounts
from entente.rollouts.figures import Figures
from entente.telemetry.metrics import check
from entente.telemetry.timing import Spans
from tasks.rollout_queue import StepRollouts
from tasks.step_figures import StepClock, endpoint_figures

NONE = EngineStats()
REPORT: Figures = {
    "start_groups": 2, "decisions": 40, "failed": 0, "orders_rejected": 0, "set_aside": 0, "prompt_tokens": 4000,
    "cached_tokens": 3000, "completion_tokens": 500, "forced_tokens": 200, "queue_ms": 1.0, "prefill_ms": 2.0, "decode_ms": 3.0,
    "engine_ms": 0.5,
}  # fmt: skip


def figures_of(reports: tuple[Figures, ...], counted: EngineStats, spans: Any = None, gpus: Any = None) -> dict[str, float]:
    """Figures of one step for which these reports came in while the flow's engine counted so much."""

    class Host:
        async def run(self, work: Any) -> Any:
            return await work

    async def stats() -> EngineStats:
        return counted

    resources: Any = SimpleNamespace(
        spans=spans or Spans(),
        host=Host(),
        engine=SimpleNamespace(stats=stats, events=dict),
        trainer=SimpleNamespace(pid=os.getpid()),
        gpus=gpus,
        games=None,
    )
    resources.endpoints = EndpointPlayers((), Path("none"), EndpointSettings())
    rolled = StepRollouts(reports=reports, ready_share=1.0, queue={})
    found = asyncio.run(StepClock(resources, NONE).end_step(rolled, {}))
    check(found)
    return found


def test_the_share_of_prefix_hits_is_of_the_prompts_whose_hits_are_counted():
    """An engine whose requests are asked in one step and answered in the next counts hits of prompts that it counted before."""
    late = replace(NONE, prompt_tokens=1000, cached_tokens=2828, completion_tokens=600, sampled_tokens=300, engine_steps=50)
    found = figures_of((REPORT, REPORT), late)
    assert found["rollout/prefix_hit_share"] == pytest.approx(0.75) and found["rollout/prompt_tokens"] == 8000
    assert found["rollout/forced_share"] == pytest.approx(0.4) and found["rollout/decisions"] == 80
    assert found["rollout/occupancy"] == 6


def test_rollouts_that_were_played_elsewhere_have_their_tokens_and_nothing_of_the_engine_here():
    found = figures_of((REPORT,), NONE)
    assert found["rollout/completion_tokens"] == 500 and found["rollout/tokens_per_s"] > 0
    assert not {"rollout/occupancy", "rollout/preemptions"} & set(found)


def test_forward_passes_before_any_completion_has_ended_have_no_occupancy():
    found = figures_of((REPORT,), replace(NONE, engine_steps=50, preemptions=2))
    assert "rollout/occupancy" not in found and found["rollout/preemptions"] == 2


def test_requests_that_workers_retried_are_counted():
    found = figures_of(({**REPORT, "engine/retries": 2.0}, {**REPORT, "engine/retries": 1.0}), NONE)
    assert found["engine/retries"] == 3


def test_endpoints_that_were_asked_have_figures_and_others_have_none():
    assert not [name for name in figures_of((REPORT,), NONE) if "endpoint" in name]
    found = endpoint_figures(AnswerCounts(answers=4, unanswered=1, unparsable=1, orders=16, missing=4, illegal=2))
    check(found)
    assert found == {
        "rollout/endpoint_decisions": 4.0,
        "rollout/endpoint_unanswered": 1.0,
        "rollout/endpoint_missing_share": 0.25,
        "rollout/endpoint_illegal": 2.0,
    }


def test_rollouts_beside_a_publication_are_waited_for_and_are_no_orchestration():
    class Recorded(Spans):
        """A publication and rollouts, both over the whole step."""

        def _all(self) -> list[tuple[str, float, float]]:
            return [("publish", 0.0, math.inf), ("rollout", 0.0, math.inf)]

    found = figures_of((), NONE, Recorded())
    assert found["time/rollout_wait_s"] == pytest.approx(found["time/step_s"]) and found["time/publish_s"] == 0
    assert found["time/orchestration_s"] == pytest.approx(0, abs=1e-9)


def test_readings_of_the_gpus_from_before_the_first_step_are_not_in_its_figures():
    class Gpus:
        """It was at work while the base was scored, and idle during the step."""

        readings = (1.0,)

        def sample(self) -> dict[str, float]:
            seen, self.readings = self.readings, ()
            return {"gpu/utilisation": max(seen, default=0.0)}

    assert figures_of((REPORT,), NONE, gpus=Gpus())["gpu/utilisation"] == 0.0
