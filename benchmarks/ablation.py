"""What each improvement is worth: on alone in the old way, and off alone in the new one, all in one harness.

Arms are ways of `benchmarks/old_way`: rollouts, files, a training step and a new version, one after the other in this process on
one thread, in CPU seconds by stage. Start groups differ in what they teach, so an arm's cost is taken per decision, rolled out
and trained apart, and put together for a step of the size that the real run has.

    gain_NAME     the old way's CPU seconds a step, over those with this improvement on, alone
    loss_NAME     the new way's CPU seconds a step with this improvement off, alone, over its own
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.kept_arms import KeptArms
from benchmarks.old_way.arm import Arm, Setting
from benchmarks.old_way.ways import IMPROVEMENTS, NEW, OLD, Way
from telemetry.progress import reporter

_LEARNING = ("read", "train", "save", "publish")
"""Stages whose cost goes with the decisions that are trained on; all others go with those that are rolled out."""
WARM_UP_GROUPS = 2
"""Start groups of the first step of an arm, which does not count."""


def arms() -> dict[str, Way]:
    """All arms by name."""
    found = {"old": OLD, "new": NEW}
    for name in IMPROVEMENTS:
        found |= {f"old+{name}": OLD.with_new(name), f"new-{name}": NEW.with_old(name)}
    return found | {
        "new-prefix_cache": replace(NEW, prefix_cache=False),
        "old-warm_up_all": replace(OLD, warm_up_all=False),
    }


def measure_ablation(setting: Setting, steps: int, kept: KeptArms, *, rolled: float, trained: float) -> dict[str, float]:
    """The table, as figures.

    Args:
        steps: of each arm; one more warms it up.
        rolled, trained: decisions of a step that costs are put together for.
    """
    results: dict[str, Any] = {}
    every = arms()
    for number, (name, way) in enumerate(every.items()):
        reporter().stage(f"ablation: {name}", number, len(every))
        label = f"ablation-{setting.seed}-{steps}-{name}"
        results[name] = kept.once(label, lambda name=name, way=way: one_arm(name, way, setting, steps))
    reporter().stage("ablation", len(every), len(every))
    return table(results, rolled=rolled, trained=trained)


def one_arm(name: str, way: Way, setting: Setting, steps: int) -> dict[str, float]:
    """CPU seconds by stage and counts of `steps` steps, after one that warms up."""
    return asyncio.run(_measure(name, way, setting, steps))


async def _measure(name: str, way: Way, setting: Setting, steps: int) -> dict[str, float]:
    arm = Arm(name.replace("+", "-with-"), way, setting)
    await arm.start()
    totals = {"rolled": 0.0, "trained": 0.0}
    before: dict[str, float] = {}
    try:
        for step in range(1, steps + 2):
            if step == 2:
                before = dict(arm.clock.cpu_s)
            rows = await arm.roll_out(step, WARM_UP_GROUPS if step == 1 else None)
            arm.publish_rows(step, rows)
            learned = await arm.learn(step)
            if step > 1:
                totals["rolled"] += learned.rolled
                totals["trained"] += learned.trained
    finally:
        await arm.close()
    stages = {f"cpu_{stage}": spent - before.get(stage, 0.0) for stage, spent in arm.clock.cpu_s.items()}
    return totals | stages


def cpu_a_step(arm: Mapping[str, float], *, rolled: float, trained: float) -> float:
    """CPU seconds of a step that rolls out and trains so many decisions, at this arm's cost of each."""
    learning = sum(spent for name, spent in arm.items() if name.removeprefix("cpu_") in _LEARNING and name.startswith("cpu_"))
    playing = sum(spent for name, spent in arm.items() if name.startswith("cpu_")) - learning
    return playing / max(1.0, arm["rolled"]) * rolled + learning / max(1.0, arm["trained"]) * trained


def table(results: Mapping[str, Mapping[str, float]], *, rolled: float, trained: float) -> dict[str, float]:
    """Gains and losses by improvement; the whole, and the stages of both ends."""
    cost = {name: cpu_a_step(arm, rolled=rolled, trained=trained) for name, arm in results.items()}
    found = {"ablation_cpu_s_old": cost["old"], "ablation_cpu_s_new": cost["new"], "ablation_speedup": cost["old"] / cost["new"]}
    for name in IMPROVEMENTS:
        found |= {f"gain_{name}": cost["old"] / cost[f"old+{name}"], f"loss_{name}": cost[f"new-{name}"] / cost["new"]}
    return found | {
        "loss_prefix_cache": cost["new-prefix_cache"] / cost["new"],
        "gain_warm_up_by_one_seat": cost["old"] / cost["old-warm_up_all"],
    }
