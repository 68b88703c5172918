"""Collects the metrics of a step from rollouts, trainer, engine and clocks."""

import os
import time
from collections.abc import Sequence

import numpy as np

from inference.engine import EngineStats, EngineWithEvents, EngineWithWorkerFigures
from outside.reading import AnswerCounts
from pipeline.play import EngineWork
from pipeline.resources import Resources
from pipeline.rollout_queue import StepRollouts
from telemetry.memory import GIVE_BACK_STEPS, give_back_memory, resident_mib
from training.messages import TrainedStep


class StepClock:
    """Measures steps. Create it when the first step starts; `end_step` ends a step and starts the next."""

    def __init__(self, resources: Resources, stats: EngineStats) -> None:
        """`stats`: the engine's counts at the start of the first step."""
        self._resources = resources
        self._step_began = time.monotonic()
        self._stats = stats
        self._events = _events(resources)
        self._orchestration_s = self._steps_s = 0.0
        self._steps = 0

    @property
    def orchestration_share(self) -> float:
        """Share of the steps' wall time spent in Prefect and the flow: neither rollouts, training nor publishing."""
        return self._orchestration_s / self._steps_s if self._steps_s else 0.0

    async def end_step(self, rolled: StepRollouts, trained: TrainedStep) -> dict[str, float]:
        """All registered metrics of the step that ends now."""
        began, now = self._step_began, time.monotonic()
        self._step_began = now
        figures = trained.metrics | self._times(rolled, began, now) | await self._rollout_figures(rolled, began, now)
        before, self._events = self._events, _events(self._resources)
        figures |= rolled.queue | outside_figures(await self._resources.host.run(self._resources.endpoints.take_all()))
        figures |= {f"engine/{name}": float(count - before.get(name, 0)) for name, count in self._events.items()}
        if isinstance(self._resources.engine, EngineWithWorkerFigures):
            figures |= self._resources.engine.scraped()
        self._steps += 1
        if self._steps % GIVE_BACK_STEPS == 0:
            give_back_memory()
        figures |= {
            "memory/flow_mib": resident_mib(os.getpid()),
            "memory/trainer_mib": resident_mib(self._resources.trainer.pid, family=True),
        }
        if self._resources.gpus is not None:
            figures |= self._resources.gpus.sample()
        return figures

    def _times(self, rolled: StepRollouts, began: float, now: float) -> dict[str, float]:
        spans, step_s = self._resources.spans, now - began
        train_s, orchestration_s = spans.seconds("train", began, now), spans.uncovered(began, now)
        times = {
            "time/step_s": step_s,
            "time/rollout_s": spans.seconds("rollout", began, now),
            "time/rollout_wait_s": spans.seconds("rollout", *rolled.waited),
            "time/train_s": train_s,
            "time/publish_s": spans.seconds("publish", began, now),
            "time/orchestration_s": orchestration_s,
            "time/orchestration_share": orchestration_s / step_s,
            "time/trainer_wait_s": step_s - train_s,
        }
        self._orchestration_s += orchestration_s
        self._steps_s += step_s
        spans.forget(before=now)
        return times

    async def _rollout_figures(self, rolled: StepRollouts, began: float, now: float) -> dict[str, float]:
        """Metrics of the rollouts received for this step, and of the flow's engine during the step.

        Without received rollouts their metrics are absent. If the flow's engine drew nothing, its metrics are absent.
        """
        reports = rolled.reports
        after = await self._resources.host.run(self._resources.engine.stats())
        before, self._stats = self._stats, after
        figures = {"rollout/ready_share": rolled.ready_share}
        if (passes := after.engine_steps - before.engine_steps) > 0:
            figures["rollout/occupancy"] = (after.drawn_tokens - before.drawn_tokens) / passes
            figures["rollout/preemptions"] = float(after.preemptions - before.preemptions)
        if not reports:
            return figures
        figures |= {
            "rollout/start_groups": float(sum(report.start_groups for report in reports)),
            "rollout/decisions": float(sum(report.decisions for report in reports)),
            "rollout/failed": float(sum(report.failed_forks for report in reports)),
            "rollout/set_aside": float(sum(report.set_aside for report in reports)),
            "rollout/orders_rejected": float(sum(report.orders_rejected for report in reports)),
        }
        if played := [report.engine_ms for report in reports if report.engine_ms is not None]:
            figures["rollout/engine_ms_p50"] = float(np.median(played))
        return figures | _token_figures([report.engine_work for report in reports if report.engine_work is not None], now - began)


def _token_figures(work: Sequence[EngineWork], seconds: float) -> dict[str, float]:
    """Token metrics of the decisions received within `seconds`; empty if no engine drew any."""
    if not work:
        return {}
    prompt, cached = sum(each.prompt_tokens for each in work), sum(each.cached_tokens for each in work)
    completion, forced = sum(each.completion_tokens for each in work), sum(each.forced_tokens for each in work)
    return _thought_figures(work) | {
        "rollout/prompt_tokens": float(prompt),
        "rollout/cached_tokens": float(cached),
        "rollout/prefix_hit_share": cached / max(1, prompt),
        "rollout/completion_tokens": float(completion),
        "rollout/tokens_per_s": completion / seconds,
        "rollout/forced_share": forced / max(1, completion),
        "rollout/queue_ms_p50": float(np.median([each.queue_ms for each in work])),
        "rollout/prefill_ms_p50": float(np.median([each.prefill_ms for each in work])),
        "rollout/decode_ms_p50": float(np.median([each.decode_ms for each in work])),
    }


def _thought_figures(work: Sequence[EngineWork]) -> dict[str, float]:
    """Metrics of thoughts; empty if no decision has one."""
    thoughts = sum(each.thoughts for each in work)
    if not thoughts:
        return {}
    return {
        "rollout/thought_tokens_mean": sum(each.thought_tokens for each in work) / thoughts,
        "rollout/thought_forced_share": sum(each.forced_thoughts for each in work) / thoughts,
    }


def _events(resources: Resources) -> dict[str, int]:
    """Counts of failures of engines or servers that were recovered from."""
    engine = resources.engine
    return engine.events() if isinstance(engine, EngineWithEvents) else {}


def outside_figures(counts: AnswerCounts) -> dict[str, float]:
    """Metrics of the decisions that endpoints were asked for during the step; empty if none was."""
    if not counts.answers:
        return {}
    return {
        "rollout/outside_decisions": float(counts.answers),
        "rollout/outside_unanswered": float(counts.unanswered),
        "rollout/outside_missing_share": counts.missing / max(1, counts.orders),
        "rollout/outside_illegal": float(counts.illegal),
    }
