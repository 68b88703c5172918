"""`growth`: how costs grow with the steps and rows of a run, and with forks, powers and horizon of its rollouts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from benchmarks.outcome import Outcome, Target
from pipeline.run_settings import MODEL_FOLDER, RunSettings
from reports.growth import Growth
from telemetry.errors import InputError

if TYPE_CHECKING:
    from benchmarks.old_way.arm import Setting

ROLLOUT_AXES = ("forks", "powers", "horizon")
AXES = ("steps", "rows", *ROLLOUT_AXES)
TARGETS = {"memory_growth_mb": Target(at_most=100.0)}
"""Of resident memory of flow and trainer together, from step 30 to step 2,000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What the measurements need."""

    settings: RunSettings
    """Settings of a run; `runs_root` is absolute."""
    arguments: Sequence[str]
    """Arguments of `entente train` that give it these settings."""
    cache: Callable[[], Path]
    """Folder of the positions; builds a missing one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthOutcome(Outcome):
    """Figures, and the same by axis."""

    growths: Sequence[Growth]
    """In the order of `AXES`."""


def check_wanted(only: Collection[str]) -> list[str]:
    """The axes to measure, in order: those of `only`, or all.

    Raises:
        InputError: a name in `only` is unknown.
    """
    if unknown := sorted(set(only) - set(AXES)):
        raise InputError(f"Growth is not measured by '{unknown[0]}', but by {', '.join(AXES)}.")
    return [axis for axis in AXES if axis in only or not only]


def bench_growth(inputs: Inputs, *, only: Collection[str] = (), quick: bool = False) -> GrowthOutcome:
    """Measure the wanted axes.

    Args:
        quick: smaller sizes and fewer rounds. The growth of memory then ends at step 200, and has no target.

    Raises:
        InputError: an argument is wrong.
        TrainingError: the run failed.
    """
    wanted, settings = check_wanted(only), inputs.settings
    growths: list[Growth] = []
    metrics: dict[str, float] = {}
    if "steps" in wanted:
        from benchmarks.growth.steps import MILESTONES, QUICK_MILESTONES, measure_steps

        milestones = QUICK_MILESTONES if quick else MILESTONES
        growth, grown_mb = measure_steps([*inputs.arguments, "--seed", str(settings.seed)], settings.runs_root, milestones)
        growths.append(growth)
        if grown_mb is not None:
            metrics["memory_growth_to_200_mb" if quick else "memory_growth_mb"] = grown_mb
    if "rows" in wanted:
        from benchmarks.growth.rows import QUICK_SIZES, SIZES, measure_rows

        growths.append(measure_rows(QUICK_SIZES if quick else SIZES, rounds=3 if quick else 7, seed=settings.seed))
    if axes := [axis for axis in wanted if axis in ROLLOUT_AXES]:
        from benchmarks.growth.rollouts import measure_rollouts

        with TemporaryDirectory(prefix="entente-bench-") as folder:
            growths += measure_rollouts(axes, setting_by_rollouts(inputs, Path(folder)), rounds=1 if quick else 3, quick=quick)
    for growth in growths:
        metrics |= growth.metrics()
    return GrowthOutcome(
        benchmark="growth",
        metrics=metrics,
        targets={name: target for name, target in TARGETS.items() if name in metrics},
        growths=growths,
    )


def setting_by_rollouts(inputs: Inputs, folder: Path) -> "Callable[[Mapping[str, object]], Setting]":
    """Gives for settings of rollouts the setting of a run that has them, with its prompts and the tiny model made for these."""
    from benchmarks.old_way.arm import Setting
    from state_cache.store import open_cache
    from training.tiny_model import make_tiny_model

    positions, given = open_cache(inputs.cache()).train, inputs.settings.model_dump(exclude_unset=True)

    def setting_of(rollouts: Mapping[str, object]) -> Setting:
        settings = RunSettings.model_validate(given | {"rollouts": {**given.get("rollouts", {}), **rollouts}})
        model = make_tiny_model(settings.runs_root / MODEL_FOLDER, settings.tiny_model, prompts=settings.prompts)
        return Setting(
            compact_model=model,
            json_model=model,  # for the old way, which is not measured here
            positions=positions,
            rollouts=settings.rollouts,
            training=settings.training,
            inference=settings.inference,
            prompts=settings.prompts,
            folder=folder,
            seed=settings.seed,
        )

    return setting_of
