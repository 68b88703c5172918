"""What branching rollouts do to the noise of a gradient, beside plain forks of the same count.

Batches are played by the tiny base model, each from positions and draws of its own, half of them with `rollouts.branch_at`. A
batch's gradient is that of its decisions' mean loss, those of groups without spread counted as the zeros that they are. Of one
arm's gradients g, over n decisions a batch:

    noise           mean of |g - mean g|^2 over the batches
    signal          |mean g|^2 - noise / batches              without the part of it that is noise
    noise a decision            n * noise                     what one decision adds
    decisions a signal          n * noise / signal            how many make both equal; left out where noise hides the signal

The late phase is compared alone, too: there both arms look for the same gradient, plain forks over boards that differ within a
group, branches at one board a group. Nothing is timed.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.decode_cases import played_positions
from benchmarks.outcome import Outcome
from decoding.codec import Codec
from inference.settings import InferenceSettings
from rollouts.fork import Tokens
from rollouts.roll_out import RolledOut, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from storage.gather import Batch
from storage.index import Index
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from telemetry.progress import reporter

LATE = 1
"""Movement phases after the first, at which the arms are compared alone, and branches begin."""
ARMS = {"plain": (), "branched": (LATE,)}
_POSITIONS, _POWER = 24, "FRANCE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One batch: its gradients, and the decisions that they are means over."""

    whole: np.ndarray
    late: np.ndarray
    decisions: int
    late_decisions: int
    spread_share: float
    """Late advantage groups whose returns differ."""


def bench_branching(
    *, batches: int = 24, groups: int = 4, forks: int = 8, years: int = 2, seed: int = 0, models_root: Path
) -> Outcome:
    """Measure; takes some minutes.

    Args:
        batches: of each arm.
        groups: start groups of a batch, branches included.
        models_root: where the tiny model lies, or is made.

    Raises:
        InputError: too few batches for a variance.
    """
    if batches < 2:
        raise InputError(f"There is no variance over {batches} batches: at least 2.")
    import torch

    from inference.torch_engine import TorchEngine
    from training.policy import Policy
    from training.settings import TinyModelSettings, TrainingSettings
    from training.tiny_model import make_tiny_model
    from training.update import Updater

    torch.manual_seed(seed)
    model = make_tiny_model(models_root, TinyModelSettings())
    settings = TrainingSettings(device="cpu")
    updater, tokens = Updater(Policy(model, settings), settings), Tokens(Codec(model))
    positions = played_positions(_POSITIONS, seed)
    arms = {
        name: RolloutSettings(start_groups=groups, forks_per_group=forks, horizon_years=years, branch_at=branch_at)
        for name, branch_at in ARMS.items()
    }
    drawn: dict[str, list[Drawn]] = {name: [] for name in arms}

    async def all_batches() -> None:
        engine = TorchEngine(model, InferenceSettings(), name="branching", device=torch.device("cpu"))
        await engine.start()
        try:
            for number in range(batches):
                for name, how in arms.items():  # in turn, from the same positions
                    starts = [(positions[(number * groups + place) % len(positions)], _POWER) for place in range(groups)]
                    plan = plan_start_groups(starts, 0, how)
                    played = await roll_out(plan, engine, tokens, how, producer=name, seed=seed * 1000 + number)
                    drawn[name].append(_gradients(played, updater, bool(how.branch_at)))
                reporter().stage("batches", number + 1, batches)
        finally:
            await engine.close()

    asyncio.run(all_batches())
    metrics: dict[str, float] = {}
    for name, found in drawn.items():
        metrics |= {f"{name}_{figure}": value for figure, value in _figures(found).items()}
    for figure in ("noise_a_decision", "late_noise_a_decision", "decisions_a_signal"):
        plain, branched = metrics.get(f"plain_{figure}"), metrics.get(f"branched_{figure}")
        if plain and branched:
            metrics[f"{figure}_ratio"] = branched / plain
    return Outcome(benchmark="branching", metrics=metrics, targets={})


def _figures(found: Sequence[Drawn]) -> dict[str, float]:
    """Of one arm."""
    figures = {
        "decisions_a_batch": float(np.mean([batch.decisions for batch in found])),
        "late_spread_share": float(np.mean([batch.spread_share for batch in found])),
    }
    noise, signal = _noise_and_signal([batch.whole for batch in found])
    figures |= {
        "noise_a_decision": noise * figures["decisions_a_batch"],
        **({"decisions_a_signal": figures["decisions_a_batch"] * noise / signal} if signal > 0 else {}),
    }
    late, _ = _noise_and_signal([batch.late for batch in found])
    return figures | {"late_noise_a_decision": late * float(np.mean([batch.late_decisions for batch in found]))}


def _noise_and_signal(gradients: Sequence[np.ndarray]) -> tuple[float, float]:
    mean = np.mean(gradients, axis=0)
    noise = float(sum(np.square(gradient - mean).sum() for gradient in gradients)) / (len(gradients) - 1)
    return noise, float(np.square(mean).sum()) - noise / len(gradients)


def _gradients(played: RolledOut, updater: Any, branched: bool) -> Drawn:
    """Gradients of a batch's decisions, and of those of the late phase."""
    with tempfile.TemporaryDirectory(prefix="entente-branching-") as folder:
        paths = RunPaths(Path(folder) / "run").create()
        publish_shard(paths, "local", 0, played.decisions, played.plies, {})
        index = Index(paths)
        index.refresh()
        rows = index.fresh_rows(policy_version=0, limit=len(played.decisions))
        batch = index.gather(rows)
    keys = list(zip(*(rows[name].to_pylist() for name in ("start_group", "power", "phase")), strict=True))
    number = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    batch = replace(batch, advantage_groups=np.array([number[key] for key in keys], np.int32))
    late_of = _late(played)
    places = zip(*(rows[name].to_pylist() for name in ("start_group", "fork", "ply")), strict=True)
    late = np.array([_is_late(place, late_of, branched) for place in places])
    several = np.bincount(batch.advantage_groups)[batch.advantage_groups] > 1
    spread = [
        np.ptp(batch.returns[batch.advantage_groups == group]) > 1e-6
        for group in np.unique(batch.advantage_groups[late & several])
    ]
    return Drawn(
        whole=_gradient(updater, batch, several),
        late=_gradient(updater, batch, late & several),
        decisions=len(keys),
        late_decisions=int(late.sum()),
        spread_share=float(np.mean(spread)) if spread else 0.0,
    )


def _late(played: RolledOut) -> dict[tuple[int, int], int]:
    """By start group and fork: the ply of the late movement phase, where it was reached."""
    later: dict[tuple[int, int], list[int]] = {}
    for ply in played.plies:
        if ply.ply and ply.phase.endswith("M"):
            later.setdefault((ply.start_group, ply.fork), []).append(ply.ply)
    return {place: sorted(plies)[LATE - 1] for place, plies in later.items() if len(plies) >= LATE}


def _is_late(place: tuple[int, int, int], late_of: dict[tuple[int, int], int], branched: bool) -> bool:
    """Plain forks are late at that phase; of the other arm only branches count, at their first."""
    group, fork, ply = place
    if branched:
        return group % 2 == 1 and ply == 0
    return late_of.get((group, fork)) == ply


def _gradient(updater: Any, batch: Batch, counted: np.ndarray) -> np.ndarray:
    """Of the mean over the decisions counted of the sum of their tokens' losses."""
    from training.advantages import leave_one_out
    from training.branching import branching_tokens

    rows = np.flatnonzero(counted)
    advantages = np.zeros(len(counted), np.float32)
    if len(rows):
        advantages[rows] = leave_one_out(batch.returns[rows], batch.advantage_groups[rows])
    size = sum(weight.numel() for weight in updater.policy.parameters())
    taught = [int(row) for row in rows if advantages[row]]
    tokens = branching_tokens(batch, taught)
    if not tokens:
        return np.zeros(size)
    updater.accumulate(batch, taught, advantages)
    parts = [weight.grad for weight in updater.policy.parameters()]
    flat = np.concatenate([np.zeros(0), *(part.flatten().double().numpy() for part in parts if part is not None)])
    return flat * tokens / len(rows)
