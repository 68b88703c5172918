"""Explains a step's time by stage, and names the bottleneck of a run and the setting that relieves it.

Stages (`entente.telemetry.stages`) add up to the wall time; forward to optimiser count as one bottleneck."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from entente.evaluation.intervals import format_count
from entente.telemetry.stages import STAGES, TRAINER_STAGES, UPDATE, stages_of

Figures = Mapping[str, float]

SLOW = 1.3
"""A step is slow at this multiple of the median of the others."""
SLOW_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    title: str
    seconds: float
    parts: dict[str, float]
    """Seconds by stage; they add up to `seconds`."""
    sentences: list[str]

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds if self.seconds else 0.0


def explain_step(steps: Mapping[int, Figures], step: int, settings: Mapping[str, Any]) -> Explanation:
    figures = steps[step]
    parts, seconds = stages_of(figures), figures["time/step_s"]
    limit = _limit(parts)
    ordered = sorted(each["time/step_s"] for each in steps.values())
    sentences = [_slowness(step, steps)] if _is_slow(step, steps, ordered) else []
    sentences += [f"{_most(limit, parts, seconds)}.", *_cause(limit[0], [figures], steps, settings)]
    return Explanation(title=f"step {step}", seconds=seconds, parts=parts, sentences=sentences)


def explain_run(steps: Mapping[int, Figures], settings: Mapping[str, Any]) -> Explanation:
    each = [stages_of(figures) for figures in steps.values()]
    parts = {name: sum(stages[name] for stages in each) for name in STAGES}
    seconds = sum(figures["time/step_s"] for figures in steps.values())
    limit = _limit(parts)
    trained = sum(figures.get("train/decisions", 0.0) for figures in steps.values())
    waiting = 1 - sum(parts[name] for name in TRAINER_STAGES) / seconds
    without = seconds - sum(parts[name] for name in limit)
    faster = f"; without it, the run would make {3600 * len(steps) / without:,.0f} steps an hour" if 0 < without < seconds else ""
    sentences = [
        f"{format_count(len(steps), 'steps')} at {3600 * len(steps) / seconds:,.0f} an hour, "
        f"{trained / seconds:,.1f} decisions trained a second; the trainer waited {waiting:.0%} of the time.",
        f"{_most(limit, parts, seconds)}{faster}.",
        *_cause(limit[0], list(steps.values()), steps, settings),
    ]
    ordered = sorted(figures["time/step_s"] for figures in steps.values())
    slow = [step for step in steps if _is_slow(step, steps, ordered)]
    if slow := sorted(slow, key=lambda step: -steps[step]["time/step_s"]):
        sentences += [_slowness(step, steps) for step in slow[:SLOW_NAMED]]
        if more := sorted(slow[SLOW_NAMED:]):
            sentences.append(f"Also slow: {', '.join(map(str, more[:8]))}{', ...' * (len(more) > 8)}.")
    return Explanation(title=format_count(len(steps), "steps"), seconds=seconds, parts=parts, sentences=sentences)


def _is_slow(step: int, steps: Mapping[int, Figures], ordered: Sequence[float]) -> bool:
    """`ordered`: the times of all steps, ascending."""
    own, others = steps[step]["time/step_s"], len(ordered) - 1
    place = bisect_left(ordered, own)
    middle = [ordered[at if at < place else at + 1] for at in ((others - 1) // 2, others // 2)] if others >= 2 else [math.inf]
    return own >= SLOW * sum(middle) / len(middle)


def _slowness(step: int, steps: Mapping[int, Figures]) -> str:
    parts, others = stages_of(steps[step]), [stages_of(steps[other]) for other in steps if other != step]
    seconds, usual = steps[step]["time/step_s"], median(steps[other]["time/step_s"] for other in steps if other != step)
    more = {name: parts[name] - median(other[name] for other in others) for name in parts}
    worst = max(more, key=more.__getitem__)
    return (
        f"Step {step} took {seconds / usual:.1f} times as long as the median of the others ({seconds:.1f} s, {usual:.1f} s); "
        f"{STAGES[worst]} took {parts[worst]:.1f} s, {more[worst]:.1f} s above its own median."
    )


def _limit(parts: Mapping[str, float]) -> tuple[str, ...]:
    together = dict.fromkeys(UPDATE if name in UPDATE else (name,) for name in parts)
    return max(together, key=lambda names: sum(parts[name] for name in names))


def _most(limit: tuple[str, ...], parts: Mapping[str, float], seconds: float) -> str:
    what = STAGES[limit[0]] if len(limit) == 1 else ", ".join(limit)
    return f"The largest share of the time, {sum(parts[name] for name in limit) / seconds:.0%}, went into {what}"


def _cause(limit: str, chosen: list[Figures], steps: Mapping[int, Figures], settings: Mapping[str, Any]) -> list[str]:
    """Cause and cure of a long stage; `forward` means the whole update."""
    if limit == "rollouts":
        return [*_troubles(chosen), *_buffer(chosen, steps, settings), *_engine(chosen, settings)]
    share = _mean(chosen, "train/unique_tokens") / max(1.0, _mean(chosen, "train/tokens"))
    return {
        "select": [
            "Selecting and copying rows blocks the trainer, which reads and verifies each new shard: check the disk of the run's "
            "folder (runs_root)."
        ],
        "plan": ["Planning time grows with the rows of a step: lower rollouts.start_groups, or raise training.token_budget."],
        "forward": [
            f"The update computes {_mean(chosen, 'train/unique_tokens_per_s'):,.0f} unique tokens a second, {share:.0%} of "
            "the raw ones. More forks of fewer positions (rollouts.forks_per_group) share more of them; a GPU (training.device), "
            "more threads (training.threads) or fewer decisions (rollouts.start_groups) make it shorter."
        ],
        "save": ["Checkpoints and adapters are synced to disk each step: put the run's folder (runs_root) on a faster one."],
        "publish": ["The adapter is loaded by each vLLM server: check the disk that they read it from (runs_root)."],
        "compare": [
            "The comparison of trainer and engine is one forward pass of the newest rows, before the first step and every so "
            "many steps: it weighs less in a longer run."
        ],
        "score": ["Scores take as long as their games: raise evaluation.every, or lower evaluation.positions."],
        "orchestration": ["Prefect's overhead is per step: play more start groups in a step (rollouts.start_groups)."],
    }[limit]


def _troubles(chosen: list[Figures]) -> list[str]:
    names = {
        "engine/ejections": "vLLM servers failed",
        "engine/engine_restarts": "engines were restarted",
        "engine/timeouts": "requests timed out",
        "engine/retries": "requests were retried on another server",
        "rollout/failed": "forks failed",
    }
    counts = {words: _sum(chosen, name) for name, words in names.items()}
    troubles = ", ".join(f"{count:.0f} {words}" for words, count in counts.items() if count)
    return [f"There were failures: {troubles}; see `entente report` and the servers' own logs."] if troubles else []


def _buffer(chosen: list[Figures], steps: Mapping[int, Figures], settings: Mapping[str, Any]) -> list[str]:
    def depth_of(figures: Figures) -> int:
        return int(figures.get("queue/depth", settings.get("pipeline", {}).get("buffer_depth", 0)))

    depth = depth_of(chosen[-1])  # a resumed run may have had another one before
    chosen, alike = ([each for each in some if depth_of(each) == depth] for some in (chosen, steps.values()))
    rollouts = median(figures.get("time/rollout_s", 0.0) for figures in alike)
    training = median(sum(stages_of(figures)[name] for name in STAGES if name != "rollouts") for figures in alike)
    if depth == 0:
        longer = max(rollouts, training)
        return [
            f"Rollouts and training take turns with a pipeline.buffer_depth of 0: {rollouts:.1f} s and {training:.1f} s. With "
            f"a depth of 1 or 2, inside storage.max_policy_lag, a step would take about {longer:.1f} s."
        ]
    ready = _mean(chosen, "rollout/ready_share")
    if ready >= 1:
        return []
    if rollouts < training:
        return [
            f"Only {ready:.0%} of the requested groups were ready. Rollouts of a step take {rollouts:.1f} s, less than the "
            f"trainer's own work, {training:.1f} s, so the buffer lasts: it is empty where a run starts or resumes, and after "
            "rollouts that took longer than usual."
        ]
    used_up = (
        "the one step that pipeline.buffer_depth keeps ahead is"
        if depth == 1
        else (f"the {depth} steps that pipeline.buffer_depth keeps ahead are")
    )
    # Below the engine's limit, steps that are played at once share its batches: more of them finish in the same time.
    deeper = "" if _has_room(chosen, settings) else "; a deeper buffer only delays that"
    return [
        f"The buffer was empty: only {ready:.0%} of the requested groups were ready. Rollouts of a step take "
        f"{rollouts:.1f} s, the trainer's own work {training:.1f} s, so {used_up} used up after the first steps, and "
        f"every later step waits{deeper}."
    ]


def _engine(chosen: list[Figures], settings: Mapping[str, Any]) -> list[str]:
    inference = settings.get("inference", {})
    elsewhere = bool(inference.get("urls"))  # servers have settings of their own
    queue, work = _queue_and_work_ms(chosen)
    if _sum(chosen, "rollout/preemptions"):
        cure = "raise inference.gpu_memory_utilization (on a CPU inference.kv_cache_gib), or lower inference.max_sequences"
        if elsewhere:
            cure = "start the servers with a higher --gpu-memory-utilization, or a lower --max-sequences (`entente serve`)"
        return [f"The engine preempted {_sum(chosen, 'rollout/preemptions'):.0f} requests because its KV cache was full: {cure}."]
    if queue > work > 0:
        return [
            f"Requests waited longer in the queue ({queue:.0f} ms) than they took to sample ({work:.0f} ms): add a worker "
            "(`entente serve`, inference.urls), or raise inference.max_sequences if its memory allows."
        ]
    together = _mean(chosen, "rollout/occupancy")
    if _has_room(chosen, settings):
        return [
            f"The engine ran {together:.0f} requests at once of at most {inference['max_sequences']}"
            f"{' (if the servers have the --max-sequences of this run)' if elsewhere else ''}: play more at a time "
            "(rollouts.start_groups, rollouts.forks_per_group, or pipeline.buffer_depth, inside storage.max_policy_lag)."
        ]
    known = [f"{together:.0f} requests at once"] if any("rollout/occupancy" in figures for figures in chosen) else []
    if any("rollout/prefix_hit_share" in figures for figures in chosen):
        known.append(f"{_mean(chosen, 'rollout/prefix_hit_share'):.0%} of prompt tokens cached")
    return [" ".join(["The engine is busy", *([f"({', '.join(known)})"] if known else [])]) + ": add a worker or a GPU."]


def _has_room(chosen: list[Figures], settings: Mapping[str, Any]) -> bool:
    """Whether the engine would have sampled more requests at once."""
    queue, work = _queue_and_work_ms(chosen)
    limited = _sum(chosen, "rollout/preemptions") > 0 or queue > work > 0
    return not limited and 0 < _mean(chosen, "rollout/occupancy") < settings.get("inference", {}).get("max_sequences", 0) / 4


def _queue_and_work_ms(chosen: list[Figures]) -> tuple[float, float]:
    work = _mean(chosen, "rollout/prefill_ms_p50") + _mean(chosen, "rollout/decode_ms_p50")
    return _mean(chosen, "rollout/queue_ms_p50"), work


def _mean(chosen: list[Figures], name: str) -> float:
    values = [figures[name] for figures in chosen if name in figures]
    return sum(values) / len(values) if values else 0.0


def _sum(chosen: list[Figures], name: str) -> float:
    return sum(figures.get(name, 0.0) for figures in chosen)
