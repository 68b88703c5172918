"""`rollout`: decisions a second of rollouts, beside those of the old way, and tokens.

Our arm rolls out as a run does and publishes a shard. The old way (`benchmarks/old_way`) has warm-ups, clones and files, with as
many start groups and forks. Arms take turns in one process on one thread, and begin each round with an empty prefix cache, as
after a new version in a run. Ratios are medians of the rounds, in CPU seconds and in wall seconds. Only decisions kept for
training count: warm-ups cost time and tokens but give none. A game is a fork.
"""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.laptop_run import cache_of
from benchmarks.old_way.engine import OldEngine
from benchmarks.old_way.play import OldRollouts
from benchmarks.old_way.prompts import make_json_model
from benchmarks.outcome import Outcome, Target
from benchmarks.played_steps import RunInputs, play_step, uncached_per_decision
from decoding.codec import Codec
from inference.engine import forget_prefixes
from inference.torch_engine import TorchEngine
from pipeline.run_settings import RunSettings
from rollouts.fork import Tokens
from state_cache.store import open_cache
from storage.runs import MODEL_FOLDER, RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from telemetry.progress import reporter
from training.tiny_model import make_tiny_model

TARGETS = {"speedup": Target(at_least=6.0)}
_PRODUCER = "bench"


def bench_rollout(settings: RunSettings, *, rounds: int) -> Outcome:
    """Measure `rounds` rounds, after one that warms up.

    Raises:
        InputError: `rounds` is below 1.
    """
    if rounds < 1:
        raise InputError(f"There is nothing to measure in {rounds} rounds: at least 1.")
    positions = open_cache(cache_of(settings)).train
    with TemporaryDirectory(prefix="entente-rollout-") as folder:
        arms: dict[str, Any] = {
            "ours": Ours(settings, positions, Path(folder) / "ours"),
            "old": Old(settings, positions, Path(folder) / "old"),
        }
        taken = asyncio.run(_measure(arms, rounds))
    return Outcome(benchmark="rollout", metrics=rollout_figures(**taken), targets=TARGETS)


class Ours:
    """The rollouts of a run."""

    def __init__(self, settings: RunSettings, positions: Any, folder: Path) -> None:
        model = make_tiny_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model, prompts=settings.prompts)
        self.engine = TorchEngine(model, settings.inference, name="ours")
        self._inputs = RunInputs(positions=positions, rollouts=settings.rollouts, seed=settings.seed)
        self._tokens, self._paths = Tokens(Codec(model), settings.prompts), RunPaths(folder).create()

    async def round(self, step: int) -> dict[str, float]:
        """Roll out one step and publish it; returns counts."""
        before, many = await self.engine.stats(), self._inputs.rollouts.start_groups
        played = await play_step(self._inputs, step, self.engine, self._tokens)
        first = (step - 1) * many
        publish_shard(self._paths, _PRODUCER, first, played.decisions, played.plies, {}, next_start_group=first + many)
        after = await self.engine.stats()
        counts = {name: float(getattr(after, name) - getattr(before, name)) for name in ("prompt_tokens", "completion_tokens")}
        return counts | {"decisions": float(len(played.decisions)), "forks": float(played.forks)}


class Old:
    """The rollouts of the old way."""

    def __init__(self, settings: RunSettings, positions: Any, folder: Path) -> None:
        model = make_json_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model)
        engine = OldEngine(model, settings.inference)
        self.engine = engine.inner
        self._rollouts = OldRollouts(model, engine, settings.rollouts, positions, settings.seed, folder)

    async def round(self, step: int) -> dict[str, float]:
        """Roll out one step and write its files; returns counts."""
        self._rollouts.counts.clear()
        rows = await self._rollouts.roll_out(step)
        self._rollouts.write(step, rows)
        return {**self._rollouts.counts, "decisions": len(rows)}


async def _measure(arms: Mapping[str, Any], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Counts and seconds of each arm in each round but the first."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    try:
        for arm in arms.values():
            await arm.engine.start()
        for number in range(rounds + 1):
            for name, arm in arms.items():
                await forget_prefixes(arm.engine)
                before = (await arm.engine.stats()).cached_tokens
                cpu, wall = time.process_time(), time.perf_counter()
                found = await arm.round(number + 1)
                found |= {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
                found["cached_tokens"] = (await arm.engine.stats()).cached_tokens - before
                reporter().say(f"rollout, round {number} of {rounds}: {name} {_rate(found):.0f} decisions a CPU second")
                if number:
                    taken[name].append(found)
    finally:
        for arm in arms.values():
            await arm.engine.close()
    return taken


def _rate(figures: Mapping[str, float]) -> float:
    return figures["decisions"] / figures["cpu_s"]


def rollout_figures(ours: list[dict[str, float]], old: list[dict[str, float]]) -> dict[str, float]:
    """The figures of all rounds, by arm."""
    pairs = list(zip(ours, old, strict=True))
    metrics = {
        "decisions_per_s": median(map(_rate, ours)),
        "decisions_per_s_old_way": median(map(_rate, old)),
        "speedup": median(_rate(a) / _rate(b) for a, b in pairs),
        "speedup_wall": median(a["decisions"] / a["wall_s"] / (b["decisions"] / b["wall_s"]) for a, b in pairs),
    }
    for suffix, rounds in (("", ours), ("_old_way", old)):
        whole = {name: sum(each[name] for each in rounds) for name in rounds[0]}
        for kind in ("prompt", "completion"):
            metrics[f"{kind}_tokens_per_game{suffix}"] = whole[f"{kind}_tokens"] / whole["forks"]
            metrics[f"{kind}_tokens_per_s{suffix}"] = whole[f"{kind}_tokens"] / whole["cpu_s"]
        metrics[f"prefix_hit_share{suffix}"] = whole["cached_tokens"] / whole["prompt_tokens"]
        metrics[f"uncached_tokens_per_decision{suffix}"] = uncached_per_decision(
            prompt_tokens=whole["prompt_tokens"], cached_tokens=whole["cached_tokens"], decisions=whole["decisions"]
        )
    warm_up = sum(each["warm_up_decisions"] for each in old)
    return metrics | {"warm_up_share_old_way": warm_up / (warm_up + sum(each["decisions"] for each in old))}
