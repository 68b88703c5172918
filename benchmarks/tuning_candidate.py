"""The process of one candidate of the tuner: plays start groups of a run with the candidate's engine, and returns its figures.

    python -m benchmarks.tuning_candidate JOB      measures one candidate (entente/telemetry/child.py)

It uses the run's seeds, so all candidates play the same games, up to rounding. It writes no files.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decode_cases import FreshPrefixes
from entente.decoding.codec import Codec
from entente.inference.choose_engine import choose_engine, engine_here
from entente.inference.settings import InferenceSettings
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer, Tokens
from entente.records.policy_version import PolicyVersion
from entente.records.rows import Decision
from entente.rollouts.groups import StartGroup, decisions_of, plan_start_groups, roll_out
from entente.settings.find_model import model_of
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.child import answer_job
from entente.telemetry.machine import apply_threads
from state_cache.sampling import sample_start_positions
from storage.adapters import published_versions, read_adapter
from storage.runs import RunPaths
from tasks.rollout_worker import cache_of


def measure(job: Mapping[str, Any]) -> dict[str, Any]:
    """Play the start groups of a job several times with the run's newest adapter, and return the figures."""
    run = settings_of(RunPaths(Path(job["run"])))
    apply_threads(job["threads"])
    return asyncio.run(_measure(run, InferenceSettings.model_validate(job["settings"]), job["start_groups"], job["rounds"]))


async def _measure(run: RunSettings, settings: InferenceSettings, count: int, rounds: int) -> dict[str, Any]:
    model = model_of(run, run.runs_root, run.run)
    positions = sample_start_positions(cache_of(run.paths, run).train, count, run.seed, 1)
    # Past versions cannot play here, and searches take too long.
    opponents = ",".join(run.rollouts.scripted_opponents) or "mover"
    played = run.model_copy(update={"rollouts": run.rollouts.model_copy(update={"opponents": opponents})})
    groups, tokens = plan_start_groups(positions, 0, played.rollouts), Tokens(Codec(model), run.prompts)
    engine = choose_engine(settings, model)
    await engine.start()
    versions = published_versions(run.paths)
    adapter = read_adapter(run.paths, versions[-1]) if versions else None
    await one_pass(engine, tokens, played, groups[:1], 1, adapter)  # warm-up: compilation and one-time allocations
    passes = [await one_pass(engine, tokens, played, groups, 2 + number, adapter) for number in range(rounds)]
    await engine.close()
    return {"engine": engine_here(settings)[0], **figures_of(passes)}


async def one_pass(
    engine: Any, tokens: Tokens, run: RunSettings, groups: list[StartGroup], number: int, adapter: PolicyVersion | None
) -> tuple[list[Decision], float]:
    """Play all start groups concurrently; returns their rows and the seconds. No prefix is cached yet: pass `number` has a
    version of that number, or without an adapter a first prompt token of its own."""
    await engine.forget_prefixes()
    if adapter is None:
        engine = FreshPrefixes(engine, number)
    else:
        await engine.publish(replace(adapter, version=number))
        await engine.retire(number)
    began = time.perf_counter()
    forks = await roll_out(groups, {POLICY: PolicyPlayer(engine, tokens)}, run.rollouts, producer="tuning", seed=run.seed)
    return decisions_of(forks), time.perf_counter() - began


def figures_of(passes: list[tuple[list[Decision], float]]) -> dict[str, float | None]:
    """`first_token_ms` is None if the engine does not measure it, as vLLM."""
    rates = [len(rows) / seconds for rows, seconds in passes]
    sampled = [row for rows, _ in passes for row in rows]
    first = [row.queue_ms + row.prefill_ms for row in sampled]
    return {
        "decisions_per_s": median(rates),
        "tokens_per_s": median(sum(len(row.input_ids) - row.prompt_len for row in rows) / seconds for rows, seconds in passes),
        "latency_ms_p99": float(np.quantile([row.decode_ms + wait for row, wait in zip(sampled, first, strict=True)], 0.99)),
        "first_token_ms": float(np.mean(first)) or None,
        "cache_hit": sum(row.cached_tokens for row in sampled) / sum(row.prompt_len for row in sampled),
        "spread": (max(rates) - min(rates)) / median(rates),
    }


if __name__ == "__main__":
    answer_job(measure)
