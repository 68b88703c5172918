"""The value of each improvement: switched on alone in the old way, and off alone in the new way, in one harness.

An arm is a way of `benchmarks/old_way`: rollouts, files, a training step and a new version, one after the other in this process
on one thread, in CPU seconds by stage. Arms train on different numbers of decisions, so costs are computed for each decision,
rolled out or trained, and then for a step of the size of the real run.

    gain_NAME     CPU seconds a step of the old way, over those of the old way with this improvement
    loss_NAME     CPU seconds a step of the new way without this improvement, over those of the new way
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
"""Stages whose cost depends on the trained decisions; the cost of all others depends on the rolled out ones."""
WARM_UP_GROUPS = 2
"""Start groups in the first step of an arm, which is not counted."""


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
    """Gains and losses as figures.

    Args:
        steps: counted steps of each arm; one more step warms up.
        rolled, trained: decisions of the step that costs are computed for.
    """
    results: dict[str, Any] = {}
    every = arms()
    for number, (name, way) in enumerate(every.items()):
        reporter().stage(f"ablation: {name}", number, len(every))
        label = f"ablation-{setting.seed}-{steps}-{name}"
        results[name] = kept.once(label, lambda name=name, way=way: asyncio.run(_measure(name, way, setting, steps)))
    reporter().stage("ablation", len(every), len(every))
    return table(results, rolled=rolled, trained=trained)


async def _measure(name: str, way: Way, setting: Setting, steps: int) -> dict[str, float]:
    """CPU seconds by stage and numbers of decisions of `steps` steps, after one that warms up."""
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
    """CPU seconds of a step with `rolled` and `trained` decisions, from an arm's cost of each decision."""
    learning = sum(spent for name, spent in arm.items() if name.removeprefix("cpu_") in _LEARNING and name.startswith("cpu_"))
    playing = sum(spent for name, spent in arm.items() if name.startswith("cpu_")) - learning
    return playing / max(1.0, arm["rolled"]) * rolled + learning / max(1.0, arm["trained"]) * trained


def table(results: Mapping[str, Mapping[str, float]], *, rolled: float, trained: float) -> dict[str, float]:
    """Gains and losses by improvement, and the ratio of the old way to the new one."""
    cost = {name: cpu_a_step(arm, rolled=rolled, trained=trained) for name, arm in results.items()}
    found = {"ablation_cpu_s_old": cost["old"], "ablation_cpu_s_new": cost["new"], "ablation_speedup": cost["old"] / cost["new"]}
    for name in IMPROVEMENTS:
        found |= {f"gain_{name}": cost["old"] / cost[f"old+{name}"], f"loss_{name}": cost[f"new-{name}"] / cost["new"]}
    return found | {
        "loss_prefix_cache": cost["new-prefix_cache"] / cost["new"],
        "gain_warm_up_by_one_seat": cost["old"] / cost["old-warm_up_all"],
    }
