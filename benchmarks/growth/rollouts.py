"""Growth with the forks of a start group, the powers of the policy, and the horizon: CPU seconds and decisions of a rollout.

Rollouts are those of `entente bench rollout`, in this process, on one thread, each round from an empty prefix cache. Sizes of an
axis take turns, each round on positions that no other size has seen. One axis changes; the others are as in the settings. A run's
policy plays one power or all seven, so that axis has two sizes, each with the prompts of such a run and the tiny model made for
them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

from benchmarks.old_way.arm import Setting
from benchmarks.rollout import Ours
from game.prompt_settings import PromptSettings
from reports.growth import Growth
from storage.index import open_index
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from telemetry.progress import reporter
from training.settings import CPU_TOKENS
from training.trie_plan import plan

SIZES: Mapping[str, Mapping[int, Mapping[str, object]]] = {
    "forks": {forks: {"forks_per_group": forks} for forks in (4, 8, 16, 32, 64)},
    "powers": {1: {"policy_powers": "one"}, 7: {"policy_powers": "all"}},
    "horizon": {years: {"horizon_years": years} for years in (1, 2, 3, 4)},
}
"""Axis -> size -> settings of rollouts."""
QUICK_MOST = {"forks": 16, "powers": 7, "horizon": 2}
"""Largest size of each axis in the quick form."""
FIGURES = {
    "cpu_s": "CPU time of a start group, s",
    "decisions": "decisions of a start group, number",
    "cpu_ms_a_decision": "CPU time of a decision, ms",
    "unique_share": "unique share of trained tokens, share",
}


class GrowingRollouts(Ours):
    """Rollouts whose settings change from step to step, with one engine."""

    async def round_with(self, setting: Setting, step: int) -> dict[str, float]:
        """Roll out one step of `setting`, which has the prompts of this engine's model; returns its figures a start group."""
        self._setting, rollouts = setting, setting.rollouts
        self._paths = RunPaths(setting.folder / setting.prompts.own_line / f"step-{step}").create()
        found = await self.round(step)
        return {
            "cpu_s": found["cpu_s"] / rollouts.start_groups,
            "decisions": found["decisions"] / rollouts.start_groups,
            "cpu_ms_a_decision": 1000 * found["cpu_s"] / found["decisions"],
        } | unique_share(self._paths, rollouts.start_groups, self._setting.seed)


def unique_share(paths: RunPaths, start_groups: int, seed: int) -> dict[str, float]:
    """Tokens that a trainer computes over the tokens of the rows that it would choose from this run, as `unique_share`; empty if
    no start group has a spread of returns, so that a step would train on nothing.
    """
    index = open_index(paths)
    query = SelectionQuery(
        step=1, policy_version=0, max_policy_lag=0, start_groups=start_groups, lineage="bench", seed=seed, balance_powers=False
    )
    chosen = index.select_batch(query).rows
    if not chosen.num_rows:
        return {}
    planned = plan(index.gather(chosen), range(chosen.num_rows), CPU_TOKENS)
    return {"unique_share": planned.unique_tokens / planned.raw_tokens}


def sizes_of(axis: str, *, quick: bool) -> list[int]:
    """The sizes at which an axis is measured."""
    return [size for size in SIZES[axis] if not quick or size <= QUICK_MOST[axis]]


def measure_rollouts(
    axes: Sequence[str], setting_of: Callable[[Mapping[str, object]], Setting], *, rounds: int, quick: bool
) -> list[Growth]:
    """Measure these axes, `rounds` times each after a round that warms up; figures are means of the rounds.

    Args:
        setting_of: the setting with these settings of rollouts, with the prompts that such a run has and the model made for them.
    """
    return asyncio.run(_measure(axes, setting_of, rounds, quick))


async def _measure(
    axes: Sequence[str], setting_of: Callable[[Mapping[str, object]], Setting], rounds: int, quick: bool
) -> list[Growth]:
    work = {(axis, size): setting_of(SIZES[axis][size]) for axis in axes for size in sizes_of(axis, quick=quick)}
    taken: dict[tuple[str, int], list[dict[str, float]]] = {each: [] for each in work}
    engines: dict[PromptSettings, GrowingRollouts] = {}
    try:
        for setting in work.values():
            if setting.prompts not in engines:
                engines[setting.prompts] = rollouts = GrowingRollouts(setting)
                await rollouts.engine.start()
                await rollouts.round_with(setting, 1)
        for number in range(rounds):
            for place, ((axis, size), setting) in enumerate(work.items()):
                reporter().stage("rollouts", number * len(work) + place, rounds * len(work))
                step = 2 + number * len(work) + place
                taken[axis, size].append(await engines[setting.prompts].round_with(setting, step))
        reporter().stage("rollouts", rounds * len(work), rounds * len(work))
    finally:
        for rollouts in engines.values():
            await rollouts.engine.close()
    return [Growth(axis=axis, figures=FIGURES, points=_points(axis, taken)) for axis in axes]


def _points(axis: str, taken: Mapping[tuple[str, int], Sequence[Mapping[str, float]]]) -> dict[int, dict[str, float]]:
    """Size -> figure -> mean over the rounds that have it."""
    return {
        size: {
            figure: mean(each[figure] for each in rounds if figure in each)
            for figure in FIGURES
            if any(figure in each for each in rounds)
        }
        for (name, size), rounds in taken.items()
        if name == axis
    }
