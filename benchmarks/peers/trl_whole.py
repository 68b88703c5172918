"""`trl_whole`: TRL's whole GRPO trainer on the game as a reward function, beside a run of the laptop preset.

Both train the same base model with as many groups, forks, updates a step and the same loss, learning rate, adapter and horizon,
one thread for TRL. TRL samples with `generate` of transformers, without a mask; `referee.py` plays what it wrote. It asks its
model once a sample, where our fork asks at every decision, so decisions trained in a CPU second are compared, of all processes,
without the first step and without start-up. All decisions that TRL steps on count for it, also those of groups without a spread,
which ours leaves out. Then both are scored alike, under the mask, after as many CPU seconds.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.entente_run import RunFigures, run_entente
from benchmarks.outcome import require_found
from benchmarks.peers.child import Child
from benchmarks.peers.environments import python_of
from benchmarks.peers.referee import Referee
from benchmarks.peers.trl_step import trl_settings
from decoding.codec import Codec
from integrations.questions import questions_of, text_for
from pipeline.run_settings import RunSettings
from rollouts.fork import POLICY, Tokens
from state_cache.store import StateCache
from telemetry.progress import reporter

STEPS, QUICK_STEPS = 20, 4


def trl_whole_figures(
    settings: RunSettings,
    arguments: Sequence[str],
    cache: StateCache,
    model: Path,
    environments: Path,
    *,
    rounds: int,
    quick: bool,
) -> dict[str, float]:
    """The ratio over `rounds` rounds, and the figures of the first one; a quick measurement has no scores.

    `trl_whole_with_spread` counts for TRL, as for ours, only decisions of groups whose rewards differ.

    Args:
        arguments: arguments of `entente train` that give it `settings`.
    """
    ratios, first = [], {}
    for number in range(rounds):
        steps = QUICK_STEPS if quick else STEPS
        ours = _our_run(settings, arguments, steps, score=not quick and not number)
        budget_s = ours.cpu_a_step * steps
        reporter().say(f"trl_whole, round {number + 1} of {rounds}: ours {budget_s:.0f} CPU s; TRL has as many")
        with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder:
            theirs = _their_run(settings, cache, model, environments, budget_s, Path(folder))
            found = _figures(ours, theirs)
            if not quick and not number:
                found |= _our_scores(ours) | asyncio.run(_their_score(settings, cache, model, Path(folder)))
        ratios.append(found.pop("trl_whole"))
        first = first or found
    return {"trl_whole": median(ratios)} | first


def _our_run(settings: RunSettings, arguments: Sequence[str], steps: int, *, score: bool) -> RunFigures:
    name = f"bench-peers-{os.getpid()}"
    words = ["--steps", str(steps), "--seed", str(settings.seed)]
    words += [] if score else ["--evaluation.positions", "2"]
    try:
        return run_entente([*arguments, *words], settings.runs_root, name)
    finally:
        shutil.rmtree(settings.runs_root / name, ignore_errors=True)


def _their_run(
    settings: RunSettings, cache: StateCache, model: Path, environments: Path, budget_s: float, folder: Path
) -> dict[str, Any]:
    """TRL's training until the budget is spent; its adapter is then in `folder`."""
    tokens = Tokens(Codec(model), settings.prompts)
    questions = questions_of(cache.train, seed=settings.seed, text=text_for(tokens))
    referee = Referee(questions=questions, rollouts=settings.rollouts)
    given = {
        "settings": trl_settings(model, settings.training),
        "prompts": [{"prompt": question.text, "number": number} for number, question in enumerate(questions)],
        "groups": settings.rollouts.start_groups,
        "forks": settings.rollouts.forks_per_group,
        "updates": settings.training.updates_per_step,
        "longest": max(tokens.tables.table(question.legal).longest for question in questions),
        "budget_s": budget_s,
        "folder": str(folder),
    }
    with Child(python_of("trl_whole", environments), "trl_whole") as child:
        found = child.request("train", given, on_question=referee.reply)
    require_found(referee.with_spread and found["decisions"], "decisions that TRL could learn from")
    return found | {
        "legal_share": referee.legal / referee.played,
        "ordered_share": referee.ordered / referee.units,
        "spread_share": referee.with_spread / referee.played,
    }


def _figures(ours: RunFigures, theirs: dict[str, Any]) -> dict[str, float]:
    our_rate = sum(ours.settled("train/decisions")) / (ours.cpu_s[-1] - ours.cpu_s[0])
    their_rate = theirs["decisions"] / theirs["cpu_s"]
    return {
        "trl_whole": our_rate / their_rate,
        "trained_per_cpu_s": our_rate,
        "trl_trained_per_cpu_s": their_rate,
        "trl_whole_with_spread": our_rate / (their_rate * theirs["spread_share"]),
        "trl_legal_share": theirs["legal_share"],
        "trl_ordered_unit_share": theirs["ordered_share"],
        "trl_spread_share": theirs["spread_share"],
        "trl_steps": float(theirs["steps"]),
        "trl_game_share": theirs["game_share"],
        "trl_sampling_share": theirs["sampling_share"],
    }


def _our_scores(ours: RunFigures) -> dict[str, float]:
    names = {"base_score": "score_base", "trained_score": "score_equal_cpu"}
    return {ours_name: float(ours.summary[name]) for name, ours_name in names.items()}


async def _their_score(settings: RunSettings, cache: StateCache, model: Path, adapter: Path) -> dict[str, float]:
    """Mean centres gained by TRL's adapter, measured as for a run: in our engine, under the legal mask."""
    from evaluation.strength import measure_strength
    from inference.adapter_check import version_in
    from inference.torch_engine import TorchEngine

    engine = TorchEngine(model, settings.inference, name="peers")
    await engine.start()
    try:
        await engine.publish(version_in(adapter, 1))
        score = await measure_strength(
            POLICY,
            settings.evaluation.opponents[0],
            cache.held_out,
            settings.evaluation,
            engine,
            Tokens(Codec(model), settings.prompts),
        )
    finally:
        await engine.close()
    return {"score_equal_cpu_trl": score.mean}
