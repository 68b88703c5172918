"""The figures of a step, put together from what rollouts, trainer, engine and clocks report.

Owns the running sums of a run; decides nothing.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from inference.engine import EngineStats, ScrapedEngine, TroubledEngine
from pipeline.controller import Seen
from pipeline.resources import Resources
from pipeline.rollout_queue import StepRollouts
from telemetry.memory import GIVE_BACK_STEPS, give_back_memory, resident_mib
from training.process import TrainedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Who plays for a run beside its own process."""

    asked: int
    """Producers that there should be."""
    alive: int
    """At work according to their own status files, whoever started them."""
    starting: int
    """Started, with no status file yet."""
    lost: int
    """Since the fleet was opened: ended without saying so, or failed."""
    published: int
    """Start groups that producers have published, over all their lives."""
    in_flight: int
    """Start groups that they play now."""


class StepClock:
    """Begins with the first step; `end_step` closes a step and begins the next."""

    def __init__(self, resources: Resources, stats: EngineStats) -> None:
        """`stats`: the engine's counts as the first step begins."""
        self._resources = resources
        self._step_began = time.monotonic()
        self._stats = stats
        self._events = _events(resources)
        self._orchestration_s = self._steps_s = 0.0
        self._steps = 0

    @property
    def orchestration_share(self) -> float:
        """Share of all these steps' wall time that was neither rollouts, trainer nor publishing: Prefect and the flow."""
        return self._orchestration_s / self._steps_s if self._steps_s else 0.0

    async def end_step(self, rolled: StepRollouts, trained: TrainedStep) -> dict[str, float]:
        """All registered figures of the step that ends now."""
        began, now = self._step_began, time.monotonic()
        self._step_began = now
        figures = trained.metrics | self._times(rolled, began, now) | await self._rollout_figures(rolled, began, now)
        before, self._events = self._events, _events(self._resources)
        figures |= rolled.queue
        figures |= {f"engine/{name}": float(count - before.get(name, 0)) for name, count in self._events.items()}
        if isinstance(self._resources.engine, ScrapedEngine):
            figures |= self._resources.engine.scraped()
        self._steps += 1
        if self._steps % GIVE_BACK_STEPS == 0:
            give_back_memory()
        figures |= {
            "memory/flow_mib": resident_mib(os.getpid()),
            "memory/trainer_mib": resident_mib(self._resources.trainer.pid),
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
        """Counts of the tasks that this step took, and the engine's own counts over the step's wall time."""
        reports = rolled.reports
        after = await self._resources.host.run(self._resources.engine.stats())
        before, self._stats = self._stats, after
        gained = {name: getattr(after, name) - getattr(before, name) for name in asdict(after)}
        gained_now = {
            "rollout/ready_share": rolled.ready_share,
            "rollout/prompt_tokens": float(gained["prompt_tokens"]),
            "rollout/cached_tokens": float(gained["cached_tokens"]),
            "rollout/prefix_hit_share": gained["cached_tokens"] / max(1, gained["prompt_tokens"]),
            "rollout/completion_tokens": float(gained["completion_tokens"]),
            "rollout/tokens_per_s": gained["completion_tokens"] / (now - began),
            "rollout/occupancy": gained["drawn_tokens"] / max(1, gained["engine_steps"]),
            "rollout/forced_share": gained["forced_tokens"] / max(1, gained["completion_tokens"]),
            "rollout/preemptions": float(gained["preemptions"]),
        }
        if not reports:
            return gained_now
        return gained_now | {
            "rollout/start_groups": float(sum(report.start_groups for report in reports)),
            "rollout/decisions": float(sum(report.decisions for report in reports)),
            "rollout/failed": float(sum(report.failed_forks for report in reports)),
            "rollout/set_aside": float(sum(report.set_aside for report in reports)),
            "rollout/orders_rejected": float(sum(report.orders_rejected for report in reports)),
            "rollout/queue_ms_p50": float(np.median([report.queue_ms for report in reports])),
            "rollout/prefill_ms_p50": float(np.median([report.prefill_ms for report in reports])),
            "rollout/decode_ms_p50": float(np.median([report.decode_ms for report in reports])),
            "rollout/engine_ms_p50": float(np.median([report.engine_ms for report in reports])),
        }


def _events(resources: Resources) -> dict[str, int]:
    """What went wrong with engines or workers so far, and was mended."""
    engine = resources.engine
    return engine.events() if isinstance(engine, TroubledEngine) else {}


def seen_in(figures: Mapping[str, float]) -> Seen:
    """What a step's figures say to the controller of the queue."""
    ready, took = figures.get("queue/ready", 0.0), figures.get("train/start_groups", 0.0)
    return Seen(
        waited_share=figures["time/rollout_wait_s"] / max(figures["time/step_s"], 1e-9),
        lag_max=figures.get("train/policy_lag_max", 0.0),
        expired=figures["queue/expired"],
        ready=max(0, int(ready - took)),
    )


def producer_figures(standing: FleetStatus) -> dict[str, float]:
    """Registered figures of rollout producers, where there is or should be one."""
    if not (standing.asked or standing.alive or standing.published):
        return {}
    return {
        "queue/producers": float(standing.alive),
        "queue/producers_asked": float(standing.asked),
        "queue/producers_lost": float(standing.lost),
        "queue/in_flight_elsewhere": float(standing.in_flight),
    }
