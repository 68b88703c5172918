"""`rollout`: decisions a second of rollouts, beside those of the old way; tokens and stages.

Our arm rolls out as a run does and publishes a shard. The old way (`benchmarks/old_way`) has warm-ups, clones and files, with as
many start groups and forks. Arms take turns in one process on one thread, and begin each round with an empty prefix cache, as
after a new version in a run. Ratios are medians of the rounds, in CPU seconds and in wall seconds. Only decisions kept for
training count: warm-ups cost time and tokens but give none. A game is a fork.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.old_way.arm import Arm, Setting, engine_of
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.ways import NEW, OLD
from benchmarks.outcome import Outcome, Target
from benchmarks.played_steps import uncached_per_decision
from decoding.codec import Codec
from inference.engine import forget_prefixes
from rollouts.fork import Tokens
from rollouts.roll_out import plan_start_groups, roll_out
from state_cache.sampling import sample_start_positions
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from telemetry.progress import reporter

TARGETS = {"speedup": Target(at_least=12.0)}
_PRODUCER = "bench"


def bench_rollout(*, rounds: int, setting: Setting) -> Outcome:
    """Measure `rounds` rounds, after one that warms up.

    Raises:
        InputError: `rounds` is below 1.
    """
    if rounds < 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds: at least 1.")
    return Outcome(benchmark="rollout", metrics=asyncio.run(_measure(rounds, setting)), targets=TARGETS)


class Ours:
    """The rollouts of a run."""

    def __init__(self, setting: Setting) -> None:
        self._setting, self.clock = setting, StageClock()
        self.engine = engine_of(NEW, setting, self.clock, "ours")
        self.tokens = Tokens(Codec(setting.compact_model), setting.prompts)
        self._paths = RunPaths(setting.folder / "ours").create()

    async def round(self, step: int) -> dict[str, float]:
        """Roll out one step and publish it; returns counts and seconds."""
        rollouts = self._setting.rollouts
        positions = sample_start_positions(self._setting.positions, rollouts.start_groups, self._setting.seed, step)
        first = (step - 1) * rollouts.start_groups
        await forget_prefixes(self.engine)
        before = await self.engine.stats()
        with _Spent(self.clock) as spent:
            played = await roll_out(
                plan_start_groups(positions, first, rollouts),
                self.engine,
                self.tokens,
                rollouts,
                producer=_PRODUCER,
                seed=self._setting.seed,
            )
            with self.clock("write"):
                publish_shard(
                    self._paths, _PRODUCER, first, played.decisions, played.plies, {}, next_start_group=first + len(positions)
                )
        after = await self.engine.stats()
        return spent.figures() | {
            "decisions": len(played.decisions),
            "games": played.forks,
            "prompt_tokens": after.prompt_tokens - before.prompt_tokens,
            "cached_tokens": after.cached_tokens - before.cached_tokens,
            "completion_tokens": after.completion_tokens - before.completion_tokens,
        }


class Harnessed:
    """Rollouts of a way of `benchmarks/old_way`."""

    def __init__(self, name: str, way: Any, setting: Setting) -> None:
        self.arm = Arm(name, way, setting, trains=False)
        self.engine = self.arm.engine

    async def round(self, step: int) -> dict[str, float]:
        """Roll out one step and write its files; returns counts and seconds."""
        self.arm.take_counts()
        await forget_prefixes(self.engine)
        before = await self.engine.stats()
        with _Spent(self.arm.clock) as spent:
            rows = await self.arm.roll_out(step)
            self.arm.publish_rows(step, rows)
        after, counts = await self.engine.stats(), self.arm.take_counts()
        return spent.figures() | {
            "decisions": len(rows),
            "games": counts.forks,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": after.cached_tokens - before.cached_tokens,
            "completion_tokens": counts.completion_tokens,
            "warm_up_decisions": counts.warm_up_decisions,
        }


class _Spent:
    """CPU and wall seconds, and CPU seconds by stage, of the work inside."""

    def __init__(self, clock: StageClock) -> None:
        self._clock, self._before = clock, Counter(clock.cpu_s)
        self.stages: dict[str, float] = {}

    def __enter__(self) -> "_Spent":
        self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s, self.wall_s = time.process_time() - self._began[0], time.perf_counter() - self._began[1]
        self.stages |= {stage: spent - self._before[stage] for stage, spent in self._clock.cpu_s.items()}

    def figures(self) -> dict[str, float]:
        return {"cpu_s": self.cpu_s, "wall_s": self.wall_s, **{f"stage_{stage}": spent for stage, spent in self.stages.items()}}


async def _measure(rounds: int, setting: Setting) -> dict[str, float]:
    every: dict[str, Any] = {
        "ours": Ours(setting),
        "harness": Harnessed("harness", NEW, setting),
        "old": Harnessed("old", OLD, setting),
    }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in every}
    try:
        for arm in every.values():
            await arm.engine.start()
        for number in range(rounds + 1):
            for name, arm in every.items():
                figures = await arm.round(number + 1)
                if number:
                    taken[name].append(figures)
                reporter().say(f"rollout, round {number} of {rounds}: {name} {_rate(figures):.0f} decisions a CPU second")
    finally:
        for arm in every.values():
            await arm.engine.close()
    return rollout_figures(taken)


def _rate(figures: Mapping[str, float]) -> float:
    return figures["decisions"] / figures["cpu_s"]


def rollout_figures(taken: Mapping[str, list[dict[str, float]]]) -> dict[str, float]:
    """The figures of all rounds, by arm: ours, harness, old."""
    ours, harness, old = taken["ours"], taken["harness"], taken["old"]
    metrics = {
        "decisions_per_s": median(map(_rate, ours)),
        "decisions_per_s_old_way": median(map(_rate, old)),
        "speedup": median(_rate(a) / _rate(b) for a, b in zip(ours, old, strict=True)),
        "speedup_wall": median(
            a["decisions"] / a["wall_s"] / (b["decisions"] / b["wall_s"]) for a, b in zip(ours, old, strict=True)
        ),
        "harness_over_real": median(_rate(b) / _rate(a) for a, b in zip(ours, harness, strict=True)),
    }
    for suffix, rounds in (("", ours), ("_old_way", old)):
        for kind in ("prompt", "completion"):
            tokens = sum(each[f"{kind}_tokens"] for each in rounds)
            metrics[f"{kind}_tokens_per_game{suffix}"] = tokens / sum(each["games"] for each in rounds)
            metrics[f"{kind}_tokens_per_s{suffix}"] = tokens / sum(each["cpu_s"] for each in rounds)
        prompt, cached, kept = (sum(each[name] for each in rounds) for name in ("prompt_tokens", "cached_tokens", "decisions"))
        metrics[f"prefix_hit_share{suffix}"] = cached / prompt
        metrics[f"uncached_tokens_per_decision{suffix}"] = uncached_per_decision(
            prompt_tokens=prompt, cached_tokens=cached, decisions=kept
        )
        metrics |= {f"share_{stage}{suffix}": share for stage, share in shares(rounds).items()}
    drawn = sum(each["warm_up_decisions"] + each["decisions"] for each in old)
    return metrics | {"warm_up_share_old_way": sum(each["warm_up_decisions"] for each in old) / drawn}


def shares(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Shares of the CPU seconds by stage; `rest` is in no stage: in our arm games, prompts, tables and rows."""
    whole = sum(each["cpu_s"] for each in rounds)
    stages: Counter[str] = Counter()
    for each in rounds:
        stages.update({name.removeprefix("stage_"): spent for name, spent in each.items() if name.startswith("stage_")})
    found = {stage: spent / whole for stage, spent in stages.items() if spent > 0}
    return found | {"rest": 1 - sum(found.values())}
