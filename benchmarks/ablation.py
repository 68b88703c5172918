"""`ablation`: the value of each improvement: switched on alone in the old way, and off alone in the new way, in one harness.

An arm is a way of `benchmarks/old_way`: rollouts, files, a training step and a new version, one after the other in this process
on one thread, in CPU seconds by stage. Arms take turns: in each round every arm starts, warms up and has one step, on the same
start groups. Arms train on different numbers of decisions, so costs are computed for each decision, rolled out or trained, and
then for a step as large as that of the new way.

    gain_NAME     CPU seconds a step of the old way, over those of the old way with this improvement
    loss_NAME     CPU seconds a step of the new way without this improvement, over those of the new way

A figure is the median over rounds; `_low` and `_high` are its least and its greatest value. Here the old way has a divergence
from the base, unlike in `bench e2e`: going without is one of the improvements (`no_reference`).
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from benchmarks.kept_arms import KeptArms
from benchmarks.old_way.arm import Arm, Setting
from benchmarks.old_way.ways import IMPROVEMENTS, NEW, OLD, Way
from benchmarks.outcome import Outcome
from telemetry.errors import InputError
from telemetry.progress import reporter

_LEARNING = ("read", "train", "save", "publish")
"""Stages whose cost depends on the trained decisions; the cost of all others depends on the rolled out ones."""
WARM_UP_GROUPS = 2
"""Start groups in the first step of an arm, which is not counted."""
NAMES = (*IMPROVEMENTS, "prefix_cache", "warm_up_by_one_seat")
"""Improvements. Both ways have a prefix cache, so it has only a loss; a warm-up by one seat has only a gain."""


def check_wanted(only: Sequence[str], rounds: int) -> tuple[str, ...]:
    """The improvements to measure: `only`, or all.

    Raises:
        InputError: a name is unknown, or there is no round.
    """
    if unknown := [name for name in only if name not in NAMES]:
        raise InputError(f"there is no improvement '{unknown[0]}'; there are {', '.join(NAMES)}")
    if rounds < 1:
        raise InputError(f"{rounds} rounds measure nothing: at least 1")
    return tuple(name for name in NAMES if not only or name in only)


def arms(names: Sequence[str] = NAMES) -> dict[str, Way]:
    """The two ways, and those that differ from one of them by one of these improvements, by name."""
    found = {"old": OLD, "new": NEW}
    for name in names:
        if name == "prefix_cache":
            found[f"new-{name}"] = replace(NEW, prefix_cache=False)
        elif name == "warm_up_by_one_seat":
            found[f"old+{name}"] = replace(OLD, warm_up_all=False)
        else:
            found |= {f"old+{name}": OLD.with_new(name), f"new-{name}": NEW.with_old(name)}
    return found


def bench_ablation(*, only: Sequence[str], rounds: int, setting: Setting, kept: KeptArms) -> Outcome:
    """Measure all arms that `kept` does not hold.

    Raises:
        InputError: see `check_wanted`.
    """
    names = check_wanted(only, rounds)
    every, tables = arms(names), []
    for number in range(rounds):
        results: dict[str, dict[str, float]] = {}
        for place, (name, way) in enumerate(every.items()):
            reporter().stage(f"ablation, arms of round {number + 1} of {rounds}", place, len(every))
            measure = lambda name=name, way=way, number=number: asyncio.run(_measure(name, way, setting, 2 + number))  # noqa: E731
            results[name] = kept.once(f"ablation: {name}, round {number + 1}", measure)
        reporter().stage(f"ablation, arms of round {number + 1} of {rounds}", len(every), len(every))
        tables.append(table(results, names))
    return Outcome(benchmark="ablation", metrics=medians(tables), targets={})


async def _measure(name: str, way: Way, setting: Setting, step: int) -> dict[str, float]:
    """CPU seconds by stage and numbers of decisions of `step`, after a smaller step that warms up."""
    arm = Arm(name.replace("+", "-with-"), way, setting)
    await arm.start()
    try:
        arm.publish_rows(1, await arm.roll_out(1, WARM_UP_GROUPS))
        await arm.learn(1)
        before = dict(arm.clock.cpu_s)
        arm.publish_rows(step, await arm.roll_out(step))
        learned = await arm.learn(step)
    finally:
        await arm.close()
    stages = {f"cpu_{stage}": spent - before.get(stage, 0.0) for stage, spent in arm.clock.cpu_s.items()}
    return {"rolled": float(learned.rolled), "trained": float(learned.trained)} | stages


def cpu_a_step(arm: Mapping[str, float], *, rolled: float, trained: float) -> float:
    """CPU seconds of a step with `rolled` and `trained` decisions, from an arm's cost of each decision."""
    learning = sum(spent for name, spent in arm.items() if name.removeprefix("cpu_") in _LEARNING and name.startswith("cpu_"))
    playing = sum(spent for name, spent in arm.items() if name.startswith("cpu_")) - learning
    return playing / max(1.0, arm["rolled"]) * rolled + learning / max(1.0, arm["trained"]) * trained


def table(results: Mapping[str, Mapping[str, float]], names: Sequence[str] = NAMES) -> dict[str, float]:
    """Gains and losses of one round by improvement, and the ratio of the old way to the new one."""
    rolled, trained = results["new"]["rolled"], results["new"]["trained"]
    cost = {name: cpu_a_step(arm, rolled=rolled, trained=trained) for name, arm in results.items()}
    found = {"ablation_cpu_s_old": cost["old"], "ablation_cpu_s_new": cost["new"], "ablation_speedup": cost["old"] / cost["new"]}
    for name in names:
        if f"old+{name}" in cost:
            found[f"gain_{name}"] = cost["old"] / cost[f"old+{name}"]
        if f"new-{name}" in cost:
            found[f"loss_{name}"] = cost[f"new-{name}"] / cost["new"]
    return found


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds, with its least and its greatest value."""
    found: dict[str, float] = {}
    for name in rounds[0]:
        values = [each[name] for each in rounds]
        found |= {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}
    return found
