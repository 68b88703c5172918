"""Collects the metrics of a step from rollouts, trainer, engine and clocks."""

import os
import time
from collections.abc import Mapping

from entente.inference.engine import EngineStats
from entente.players.read_answer import AnswerCounts
from entente.rollouts.figures import Figures, add_up
from entente.telemetry.memory import GIVE_BACK_STEPS, give_back_memory, private_mib
from entente.telemetry.metrics import METRICS
from entente.telemetry.stages import stages_of
from tasks.open_objects import OpenRun
from tasks.rollout_queue import StepRollouts


class StepClock:
    """Measures steps. Create it at the start of the first step; `end_step` ends a step and starts the next."""

    def __init__(self, resources: OpenRun, stats: EngineStats) -> None:
        self._resources = resources
        self._step_began = time.monotonic()
        self._stats = stats
        self._events = resources.engine.events()
        if resources.gpus is not None:
            resources.gpus.sample()  # drops the readings of the time before, in which the base was scored
        self._steps = 0

    async def end_step(self, rolled: StepRollouts, trained: Mapping[str, float]) -> dict[str, float]:
        began, now = self._step_began, time.monotonic()
        self._step_began = now
        figures = {**trained} | self._times(trained, began, now) | await self._rollout_figures(rolled, began, now)
        before, self._events = self._events, self._resources.engine.events()
        figures |= rolled.queue | endpoint_figures(await self._resources.host.run(self._resources.endpoints.take_all()))
        figures |= {f"engine/{name}": float(count - before.get(name, 0)) for name, count in self._events.items()}
        # Those of worker processes come with their rollouts.
        elsewhere = {name: count for name, count in add_up(rolled.reports).items() if name.startswith("engine/")}
        figures |= {name: figures.get(name, 0.0) + count for name, count in elsewhere.items()}
        self._steps += 1
        if self._steps % GIVE_BACK_STEPS == 0:
            give_back_memory()
        figures |= {
            "memory/flow_mib": private_mib(os.getpid()),
            "memory/trainer_mib": private_mib(self._resources.trainer.pid, family=True),
        }
        if self._resources.gpus is not None:
            figures |= self._resources.gpus.sample()
        return figures

    def _times(self, trained: Mapping[str, float], began: float, now: float) -> dict[str, float]:
        spans, step_s = self._resources.spans, now - began
        train_s = spans.seconds("train", began, now)
        times = {
            "time/step_s": step_s,
            "time/rollout_s": spans.seconds("rollout", began, now),
            "time/rollout_wait_s": spans.alone("rollout", began, now, or_with="publish"),
            "time/compare_s": spans.seconds("compare", began, now),
            "time/train_s": train_s,
            "time/publish_s": spans.alone("publish", began, now),
            "time/score_s": spans.seconds("score", began, now),
            "time/trainer_wait_s": step_s - train_s,
        }
        orchestration_s = stages_of({**trained} | times)["orchestration"]
        times |= {"time/orchestration_s": orchestration_s, "time/orchestration_share": orchestration_s / step_s}
        spans.forget(before=now)
        return times

    async def _rollout_figures(self, rolled: StepRollouts, began: float, now: float) -> dict[str, float]:
        after = await self._resources.host.run(self._resources.engine.stats())
        before, self._stats = self._stats, after
        figures = {"rollout/ready_share": rolled.ready_share}
        if (passes := after.engine_steps - before.engine_steps) > 0:
            if (sampled := after.sampled_tokens - before.sampled_tokens) > 0:  # else no completion has ended
                figures["rollout/occupancy"] = sampled / passes
            figures["rollout/preemptions"] = float(after.preemptions - before.preemptions)
        return figures | rollout_metrics(add_up(rolled.reports), now - began)


def rollout_metrics(counted: Figures, seconds: float) -> dict[str, float]:
    made = {f"rollout/{name}{'_p50' if name.endswith('_ms') else ''}": value for name, value in counted.items()}
    metrics = {name: value for name, value in made.items() if name in METRICS}
    if completion := counted.get("completion_tokens"):
        metrics["rollout/prefix_hit_share"] = counted["cached_tokens"] / max(1, counted["prompt_tokens"])
        metrics["rollout/tokens_per_s"] = completion / seconds
        metrics["rollout/forced_share"] = counted["forced_tokens"] / completion
    if thoughts := counted.get("thoughts"):
        metrics["rollout/thought_tokens_mean"] = counted["thought_tokens"] / thoughts
        metrics["rollout/thought_truncated_share"] = counted["forced_thoughts"] / thoughts
    return metrics


def endpoint_figures(counts: AnswerCounts) -> dict[str, float]:
    """Metrics of the decisions by endpoints during the step; empty without any."""
    if not counts.answers:
        return {}
    return {
        "rollout/endpoint_decisions": float(counts.answers),
        "rollout/endpoint_unanswered": float(counts.unanswered),
        "rollout/endpoint_missing_share": counts.missing / max(1, counts.orders),
        "rollout/endpoint_illegal": float(counts.illegal),
    }
